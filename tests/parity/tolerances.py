"""How close is equal: the one place parity tests take their tolerances from."""

LOGITS_FLOAT32 = 1e-4
"""Absolute. Kernels add in another order, a dozen tiny layers deep; a wrong weight moves a logit by 0.1 and more."""

LOGITS_FLOAT32_RANKS = 1e-4
"""Absolute. A sum over ranks is the same sum in another order."""

LOGITS_FLOAT32_REAL_MODEL = 1e-3
"""Absolute. Thirty layers, and logits around 20."""

PERPLEXITY_FLOAT32 = 1e-3
"""Absolute, of about 27. Logits differ in the fifth digit, and a perplexity averages them over hundreds of tokens."""

LOGITS_FLOAT16_ONNX = 5e-2
"""Absolute, against float32, of logits up to 5. Eleven significant bits, rounded after every operator of two layers."""

ROUNDING_INT8_ACTIVATIONS = 4e-2
"""Root mean square of the error over that of the logits. Every block of activations is rounded to 8 bits before every
packed product, which alone costs half a per cent; tiny models have two layers of seven and average nothing out."""
