"""A model of several networks, each packed otherwise: what planning and exporting it cost, beside copying its bytes.

LLaVA's shapes with half of a 7B language model: CLIP-L/336 in 8 bits, the language model in 4, as Olive lays both out;
the table and the head in float16.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import checkpoints
from benchmarks.checkpoints import Entry, Shapes
from benchmarks.measure import Row, Sample, in_turn, process, warm
from benchmarks.onnx_export import scratch

TEXT = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
}  # fmt: skip
SCHEMES = {"decoder": (4, 32), "vision_encoder": (8, 64)}
"""Bits and group of each packed component."""
CONFIG: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "torch_dtype": "float16",
    "text_config": TEXT,
    "vision_config": VISION,
    "component_quantization": {
        name: {"quant_method": "olive", "bits": bits, "group_size": group, "symmetric": True}
        for name, (bits, group) in SCHEMES.items()
    },
}
DATA = "model.onnx.data"
PEAK = 400
"""MB of resident memory that the export may take."""


def checkpoint() -> Path:
    """Made once, 2.5 GB."""
    return checkpoints.made("llava-7b-half", _write)


def rows(runs: int) -> Iterator[Row]:
    """One row for planning, one for exporting."""
    folder = checkpoint()
    warm(checkpoints.weights(folder))
    plan = in_turn({"plan": partial(process, "-m", "waybill", "plan", str(folder), "--target", "onnx")}, runs)["plan"]
    yield Row(
        "plan of an export, LLaVA-shaped, two layouts, whole process",
        plan.text(),
        "–",
        "–",
        "≤ 1 s",
        plan.median() <= 1,
        "importing; then describing the tensors",
    )
    with scratch() as place:
        taken = in_turn({"export": partial(_export, folder, place), "copy": partial(_copy, place)}, runs)
    copy, export = taken["copy"], taken["export"]
    ratio, peak = export.median("unflushed") / copy.median(), export.median("peak") / 1e6
    stored, written = checkpoints.weights(folder).stat().st_size / 1e9, export.samples[0]["bytes"] / 1e9
    yield Row(
        f"export, LLaVA-shaped, 4, 8 and 16 bits, {stored:.1f} GB to {written:.1f} GB, whole process",
        f"{export.text('s', 'unflushed')} and {export.median('flush'):.2f} s to flush, {peak:.0f} MB",
        f"cp of what was written {copy.text()}",
        f"{ratio:.2f} × cp",
        f"≤ 2 ×, ≤ {PEAK} MB",
        ratio <= 2 and peak <= PEAK,
        "hashing what is written, and widening the float tables",
    )


def _copy(place: Path) -> Sample:
    """`cp`, of all the bytes that an export has just written."""
    out = place / "copy"
    os.sync()
    start = time.perf_counter()
    subprocess.run(["cp", str(place / "package" / DATA), str(out)], check=True)
    seconds = time.perf_counter() - start
    out.unlink()
    return {"seconds": seconds}


def _export(folder: Path, place: Path) -> Sample:
    out = place / "package"
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    sample = process("-m", "waybill", "export", str(folder), str(out), "--json")
    receipt = json.loads(sample["output"])
    flush = receipt["flush_seconds"]
    return sample | {"flush": flush, "unflushed": sample["seconds"] - flush, "bytes": receipt["data_bytes"]}


def _write(folder: Path) -> None:
    entries: dict[str, Entry] = {}
    for name, shape in (_language() | _tower()).items():
        module = name.removesuffix(".weight")
        layered = ".layers." in name or "projector" in name
        if len(shape) == 2 and layered:
            bits, group = SCHEMES["decoder" if name.startswith("language") else "vision_encoder"]
            entries |= _olive(module, *shape, bits, group)
        else:
            entries[name] = Entry("F16", shape, partial(checkpoints.scales, name, math.prod(shape)))
    checkpoints.write_entries(folder, CONFIG, entries)


def _language() -> Shapes:
    hidden, inner, root = TEXT["hidden_size"], TEXT["intermediate_size"], "language_model.model"
    shapes: Shapes = {
        f"{root}.embed_tokens.weight": (TEXT["vocab_size"], hidden),
        "language_model.lm_head.weight": (TEXT["vocab_size"], hidden),
        f"{root}.norm.weight": (hidden,),
    }
    for layer in range(TEXT["num_hidden_layers"]):
        path = f"{root}.layers.{layer}"
        shapes |= {f"{path}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{path}.self_attn.{letter}_proj.weight": (hidden, hidden) for letter in "qkvo"}
        shapes |= checkpoints.mlp(f"{path}.mlp", hidden, inner)
    return shapes


def _tower() -> Shapes:
    """CLIP's tower as the hub spells it, and the projector."""
    hidden, inner, root = VISION["hidden_size"], VISION["intermediate_size"], "vision_tower.vision_model"
    patch, positions = VISION["patch_size"], (VISION["image_size"] // VISION["patch_size"]) ** 2 + 1
    text, projector = TEXT["hidden_size"], "multi_modal_projector.linear"
    shapes: Shapes = {
        f"{root}.embeddings.class_embedding": (hidden,),
        f"{root}.embeddings.patch_embedding.weight": (hidden, 3, patch, patch),
        f"{root}.embeddings.position_embedding.weight": (positions, hidden),
        f"{projector}_1.weight": (text, hidden),
        f"{projector}_2.weight": (text, text),
        f"{projector}_1.bias": (text,),
        f"{projector}_2.bias": (text,),
    }
    for norm in ("pre_layrnorm", "post_layernorm"):
        shapes |= {f"{root}.{norm}.{leaf}": (hidden,) for leaf in ("weight", "bias")}
    for layer in range(VISION["num_hidden_layers"]):
        path = f"{root}.encoder.layers.{layer}"
        matrices = {f"self_attn.{letter}_proj": (hidden, hidden) for letter in ("q", "k", "v", "out")}
        matrices |= {"mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}
        shapes |= {f"{path}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"{path}.{name}.bias": shape[:1] for name, shape in matrices.items()}
        for norm in ("layer_norm1", "layer_norm2"):
            shapes |= {f"{path}.{norm}.{leaf}": (hidden,) for leaf in ("weight", "bias")}
    return shapes


def _olive(path: str, outputs: int, inputs: int, bits: int, group: int) -> dict[str, Entry]:
    """Symmetric: no zero points."""
    codes, scales = (outputs, inputs * bits // 8), (outputs, inputs // group)
    return {
        f"{path}.qweight": Entry("U8", codes, partial(checkpoints.octets, path, math.prod(codes))),
        f"{path}.scales": Entry("F16", scales, partial(checkpoints.scales, path, math.prod(scales))),
    }
