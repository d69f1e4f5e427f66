"""Claims with numbers: `python -m benchmarks` measures this library and its peers, and writes the table."""
