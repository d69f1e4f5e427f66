"""One table per architecture family: data, not code."""
