"""Models: how layers make a decoder, and which architectures are such a decoder."""
