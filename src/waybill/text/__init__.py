"""Text to tokens and back: the tokenizer, stop tokens, and chat templates. Knows no model and no target."""
