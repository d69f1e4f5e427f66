"""Parts that graphs share: decoders, encoders of text, vision and audio are put together from them."""
