"""What a model is given besides text: pictures and sound, as the arrays it was trained on."""
