"""A decoder in 4 bits whose layers have inputs of their own, with the matrices for those left in float.

The checkpoint is written without any library but safetensors: what config.json says is all there is to know.

python examples/per_layer_inputs.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import waybill
from waybill.onnx.folder import read_package
from waybill.onnx.runtime.model import Inputs, open_model

HIDDEN, INNER, LAYERS, VOCAB, OWN, GROUP = 64, 96, 2, 128, 32, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "tie_word_embeddings": True, "torch_dtype": "float32",
    "hidden_size_per_layer_input": OWN,
    "component_quantization": {"decoder": {
        "quant_method": "olive", "bits": 4, "group_size": GROUP, "symmetric": True,
        "modules_to_not_convert": [r"re:.*\.per_layer_(input_gate|projection)", "model.per_layer_model_projection"],
    }},
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (32, HIDDEN), "self_attn.v_proj": (32, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
random = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    """Random weights."""
    return (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)


def tensors() -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint."""
    made = {
        "model.embed_tokens.weight": floats(VOCAB, HIDDEN),
        "model.embed_tokens_per_layer.weight": floats(VOCAB, LAYERS * OWN),
        "model.per_layer_model_projection.weight": floats(LAYERS * OWN, HIDDEN),
        "model.per_layer_projection_norm.weight": np.ones(OWN, np.float32),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        made[f"{path}.per_layer_input_gate.weight"] = floats(OWN, HIDDEN)
        made[f"{path}.per_layer_projection.weight"] = floats(HIDDEN, OWN)
        for norm in ("input_layernorm", "post_attention_layernorm", "post_per_layer_input_norm"):
            made[f"{path}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
        for name, (rows, columns) in SHAPES.items():
            made[f"{path}.{name}.qweight"] = random.integers(0, 256, (rows, columns // 2), np.uint8)
            made[f"{path}.{name}.scales"] = np.full((rows, columns // GROUP), 0.02, np.float16)
    return made


with tempfile.TemporaryDirectory() as place:
    checkpoint, package = Path(place) / "checkpoint", Path(place) / "package"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), checkpoint / "model.safetensors")

    bill = waybill.plan(checkpoint, "onnx")
    kept = [spec.name for spec in bill.specs if spec.kind == "linear" and spec.packing is None]
    print(f"{bill.summary()}; {len(bill.packings)} matrices packed, {len(kept)} float")

    waybill.build(checkpoint).save(package)
    answer = open_model(read_package(package)).generate(Inputs([[5, 6, 7]]), max_new_tokens=8)
    print(answer.token_ids)
