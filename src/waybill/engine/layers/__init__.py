"""Layers: small objects that hold tensors under the names of their attributes, and compute."""
