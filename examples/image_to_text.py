"""LLaVA: pictures to features, features among tokens, and a language model; each component in a layout of its own.

The language model is packed to 4 bits and the vision tower to 8, by a few lines that stand for a quantizer.

python examples/image_to_text.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import load_file, save_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import waybill
from waybill.media.image import pixel_values, read_image
from waybill.media.transform import read_image_transform
from waybill.onnx.folder import read_package
from waybill.onnx.runtime.model import Inputs, open_model

IMAGE = 100
LAYOUTS = {"decoder": (4, 32), "vision_encoder": (8, 32)}
"""Bits, and elements that share a scale."""
config = LlavaConfig(
    vision_config=CLIPVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
                                   image_size=28, patch_size=14),
    text_config=LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                            num_key_value_heads=2, vocab_size=128),
    image_token_index=IMAGE,
)  # fmt: skip
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
}


def packed(weight: np.ndarray, bits: int, group: int) -> dict[str, np.ndarray]:
    """Rounded to nearest, symmetric: codes along K with the first in the low bits, and scales."""
    rows, columns = weight.shape
    grouped = weight.reshape(rows, columns // group, group)
    scales = (np.abs(grouped).max(-1) / ((1 << bits - 1) - 1)).astype(np.float16)
    codes = np.rint(grouped / scales[..., None].astype(np.float32)) + (1 << bits - 1)
    fields = codes.clip(0, (1 << bits) - 1).astype(np.uint8).reshape(rows, -1, 8 // bits)
    octets = (fields << (np.arange(8 // bits, dtype=np.uint8) * bits)).sum(-1, dtype=np.uint8)
    return {"qweight": octets, "scales": scales}


def pack_components(folder: Path) -> None:
    """Every projection of the layers, and what config.json says about it."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".layers." in name and tensors[name].ndim == 2]:
        bits, group = LAYOUTS["decoder" if name.startswith("language_model") else "vision_encoder"]
        tensors |= {f"{name}_{role}": made for role, made in packed(tensors.pop(name), bits, group).items()}
    save_file(tensors, folder / "model.safetensors")
    stated = json.loads((folder / "config.json").read_text())
    stated["component_quantization"] = {
        name: {"quant_method": "olive", "bits": bits, "group_size": group, "symmetric": True,
               "modules_to_not_convert": ["model.multi_modal_projector"]}
        for name, (bits, group) in LAYOUTS.items()
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(stated))


with tempfile.TemporaryDirectory() as place:
    checkpoint, package = Path(place) / "checkpoint", Path(place) / "package"
    LlavaForConditionalGeneration(config).save_pretrained(checkpoint)
    (checkpoint / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    pack_components(checkpoint)

    waybill.build(checkpoint).save(package)
    report = waybill.verify(package, checkpoint)
    print(f"{report.weights} weights equal the checkpoint; {len(report.runs)} graphs opened and ran")

    Image.fromarray(np.arange(40 * 60 * 3, dtype=np.uint8).reshape(40, 60, 3)).save(Path(place) / "picture.png")
    pixels = pixel_values(read_image(Path(place) / "picture.png"), read_image_transform(package))
    model = open_model(read_package(package))
    answer = model.generate(Inputs([[1, IMAGE, 5, 6]], [{"pixel_values": pixels[None]}]), max_new_tokens=8)
    print(answer.token_ids)
