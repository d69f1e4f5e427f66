"""Coverage-guided fuzzing of everything that reads a stranger's bytes: `python -m fuzz TARGET [libFuzzer options]`."""
