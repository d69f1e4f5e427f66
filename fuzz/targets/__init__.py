"""One file a parser: `SEEDS` to begin with, `check` for one input, `mutate` where flipped bits would be no input."""
