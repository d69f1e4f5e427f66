"""ONNX packages: a decoder as a graph, its weights beside it, and everything a runtime needs to run it. No torch."""
