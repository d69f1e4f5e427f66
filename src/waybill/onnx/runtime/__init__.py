"""Running packages in onnxruntime."""
