"""Proving a package: its parts agree, its bytes are those that were written, it runs, and it is its checkpoint."""
