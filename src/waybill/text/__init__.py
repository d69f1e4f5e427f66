"""Text to tokens and back: tokenizer, stop tokens, chat templates, requests. Knows no model and no target."""
