"""Synthetic checkpoints, made once: random weights of real shapes, float or packed. No torch.

Packed ones hold random codes as producers lay them out, which is all that speed depends on; SmolLM2's are rounded.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

Shapes = dict[str, tuple[int, ...]]
Blocks = Callable[[], Iterator[Any]]
"""Makes the bytes of one tensor, as arrays of a few megabytes one after another."""


class Entry(NamedTuple):
    """One tensor to write."""

    dtype: str
    shape: tuple[int, ...]
    blocks: Blocks


QWEN3 = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
DENSE = QWEN3 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}
LARGE = MOE | {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "num_experts": 128,
    "moe_intermediate_size": 1536,
    "tie_word_embeddings": False,
}
LARGE_SHARDS = 118
WIDE = DENSE | {
    "num_hidden_layers": 20,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "vocab_size": 8192,
}
"""Qwen3-1.7B's layers, fewer of them, and a small vocabulary: nearly all of it is packed."""
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 3,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
"""gpt-oss-20b's layers, three of them, and a small vocabulary."""
GROUP = 128
"""Elements of K that share a scale in the synthetic packed checkpoints."""
QUANTIZATION = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "olive": {"quant_method": "olive", "bits": 4, "group_size": GROUP, "symmetric": False},
}
"""What each producer writes unless told otherwise: GPTQ has midpoint zero points and a g_idx, the others have any."""
SMOL_GROUP = 64
PACKED = "_proj.weight"
ITEM = {"BF16": 2, "F16": 2, "I32": 4, "U8": 1}


def dense() -> Path:
    """Qwen3-0.6B's shapes in one file of 1.5 GB: tied, and the head stored again with equal bytes, as published."""
    return made("qwen3-0.6b-shaped", lambda folder: _write(folder, DENSE, {"lm_head.weight": _table(DENSE)}))


def moe() -> Path:
    """64 experts a layer, every expert's three matrices stored as tensors of 1 MB."""
    return made("qwen3-moe-shaped", lambda folder: _write(folder, MOE, {}))


def large() -> Path:
    """Qwen3-235B-A22B's headers, 36,945 tensors in 118 files that have their full length and no blocks on disk."""
    return made("qwen3-235b-shaped", lambda folder: _write_large(folder, LARGE, _large_entries()))


def packed_large() -> Path:
    """The same as GPTQ writes it: 36,472 packed records, four tensors each."""
    config = LARGE | {"quantization_config": QUANTIZATION["gptq"]}
    return made(
        "qwen3-235b-gptq", lambda folder: _write_large(folder, config, _packed_entries(_large_entries(), "gptq"))
    )


def packed_wide(method: str) -> Path:
    """20 of Qwen3-1.7B's layers in 4 bits as gptq, awq or olive lays them out: 0.56 GB."""
    return made(f"qwen3-1.7b-{method}", lambda folder: _write_packed(folder, WIDE, method))


def gguf_wide(block_type: str) -> Path:
    """20 layers of a llama of the same sizes in blocks of one type: a GGUF file of 0.5 to 1.0 GB."""
    folder = made(f"llama-1.7b-{block_type}", partial(_write_gguf, block_type))
    return folder / "model.gguf"


def gpt_oss() -> Path:
    """Three of gpt-oss-20b's layers, the experts in MXFP4: 1.5 GB."""
    return made("gpt-oss-20b-shaped", _write_gpt_oss)


def packed_dense() -> Path:
    """Qwen3-0.6B's shapes as GPTQ writes them, the table in bfloat16: 0.54 GB."""
    return made("qwen3-0.6b-gptq", lambda folder: _write_packed(folder, DENSE, "gptq"))


def packed_smol(source: Path) -> Path:
    """The demo model with its projections rounded to 4 bits as Olive lays them out, everything else bfloat16."""
    return made("smollm2-olive", lambda folder: _write_smol(folder, source))


def gptq_smol(source: Path, bits: int) -> Path:
    """The demo model with its projections rounded to 4 or 8 bits as GPTQ lays them out, everything else float16."""
    return made(f"smollm2-gptq{bits}", lambda folder: _write_gptq_smol(folder, source, bits))


def weights(folder: Path) -> Path:
    """The one weight file of a checkpoint; a GGUF file is both."""
    return folder if folder.is_file() else folder / "model.safetensors"


def home() -> Path:
    """Where they are kept."""
    if stated := os.environ.get("WAYBILL_BENCH_DIR"):
        return Path(stated)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "waybill" / "bench"


def made(name: str, write: Callable[[Path], None]) -> Path:
    """The folder of that name, written if it is not there."""
    folder = home() / name
    if not folder.is_dir():
        staging = folder.with_name(f"{name}.{os.getpid()}.tmp")
        staging.mkdir(parents=True)
        try:
            write(staging)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder


def _table(config: dict[str, Any]) -> tuple[int, ...]:
    return config["vocab_size"], config["hidden_size"]


def _shapes(config: dict[str, Any]) -> Shapes:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: Shapes = {"model.embed_tokens.weight": _table(config), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        attention = f"{path}.self_attn"
        shapes |= {
            f"{path}.input_layernorm.weight": (hidden,),
            f"{path}.post_attention_layernorm.weight": (hidden,),
            f"{attention}.q_proj.weight": (q, hidden),
            f"{attention}.k_proj.weight": (kv, hidden),
            f"{attention}.v_proj.weight": (kv, hidden),
            f"{attention}.o_proj.weight": (hidden, q),
            f"{attention}.q_norm.weight": (head_dim,),
            f"{attention}.k_norm.weight": (head_dim,),
        }
        if experts := config.get("num_experts"):
            shapes[f"{path}.mlp.gate.weight"] = (experts, hidden)
            for expert in range(experts):
                shapes |= mlp(f"{path}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        else:
            shapes |= mlp(f"{path}.mlp", hidden, config["intermediate_size"])
    return shapes


def mlp(path: str, hidden: int, inner: int) -> Shapes:
    """The matrices of a gated feed-forward network."""
    return {
        f"{path}.gate_proj.weight": (inner, hidden),
        f"{path}.up_proj.weight": (inner, hidden),
        f"{path}.down_proj.weight": (hidden, inner),
    }


def _header(entries: Mapping[str, Entry]) -> tuple[bytes, int]:
    """The header of a file that holds these tensors in name order, and the bytes of its data."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(entries):
        dtype, shape, _ = entries[name]
        start, end = end, end + ITEM[dtype] * math.prod(shape)
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _write(folder: Path, config: dict[str, Any], extra: Shapes) -> None:
    write_entries(folder, config, _floats(_shapes(config) | extra, dict.fromkeys(extra, "model.embed_tokens.weight")))


def write_entries(folder: Path, config: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
    """A checkpoint of one file."""
    with weights(folder).open("wb") as file:
        file.write(_header(entries)[0])
        for name in sorted(entries):
            for block in entries[name].blocks():
                file.write(block)
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")


def _floats(shapes: Shapes, same_as: Mapping[str, str]) -> dict[str, Entry]:
    """bfloat16 tensors of random values; those in `same_as` repeat another's."""
    return {
        name: Entry("BF16", shape, partial(_values, same_as.get(name, name), math.prod(shape)))
        for name, shape in shapes.items()
    }


def _values(name: str, count: int) -> Iterator[Any]:
    """Random bfloat16 of magnitude 2⁻⁷ to 2⁻⁶, either sign, the same for the same name."""
    import numpy as np

    for bits in _random(name, count, np.uint16):
        yield bits & np.uint16(0x807F) | np.uint16(0x3C00)


def _random(name: str, count: int, dtype: Any) -> Iterator[Any]:
    import numpy as np

    random = np.random.default_rng(zlib.crc32(name.encode()))
    for start in range(0, count, 1 << 22):
        yield random.integers(0, np.iinfo(dtype).max, min(1 << 22, count - start), dtype, endpoint=True)


def _write_packed(folder: Path, config: dict[str, Any], method: str) -> None:
    entries = _packed_entries(_floats(_shapes(config), {}), method)
    write_entries(folder, config | {"quantization_config": QUANTIZATION[method]}, entries)


def _packed_entries(floats: Mapping[str, Entry], method: str) -> dict[str, Entry]:
    """The entries of a float checkpoint, those of projections as a producer lays them out."""
    entries: dict[str, Entry] = {}
    for name, entry in floats.items():
        matrix = name.endswith(PACKED)
        outputs_inputs = entry.shape if matrix else (0, 0)
        entries |= _sidecars(name.removesuffix(".weight"), *outputs_inputs, method) if matrix else {name: entry}
    return entries


def _sidecars(path: str, outputs: int, inputs: int, method: str) -> dict[str, Entry]:
    """The tensors of one packed weight [outputs, inputs]."""
    import numpy as np

    groups = inputs // GROUP

    def words(role: str, *shape: int) -> Entry:
        return Entry("I32", shape, partial(_random, f"{path}.{role}", math.prod(shape), np.uint32))

    def octets(role: str, *shape: int) -> Entry:
        return Entry("U8", shape, partial(_random, f"{path}.{role}", math.prod(shape), np.uint8))

    def halves(*shape: int) -> Entry:
        return Entry("F16", shape, partial(scales, f"{path}.scales", math.prod(shape)))

    if method == "gptq":
        made = {
            "qweight": words("qweight", inputs // 8, outputs),
            # Eight midpoints, each less one: what version 1 stores.
            "qzeros": Entry("I32", (groups, outputs // 8), lambda: iter([np.full(groups * outputs // 2, 0x77, "u1")])),
            "scales": halves(groups, outputs),
            "g_idx": Entry("I32", (inputs,), lambda: iter([np.arange(inputs, dtype=np.int32) // GROUP])),
        }
    elif method == "awq":
        made = {
            "qweight": words("qweight", inputs, outputs // 8),
            "qzeros": words("qzeros", groups, outputs // 8),
            "scales": halves(groups, outputs),
        }
    else:
        made = {
            "qweight": octets("qweight", outputs, inputs // 2),
            "qzeros": octets("qzeros", outputs, groups // 2),
            "scales": halves(outputs, groups),
        }
    return {f"{path}.{role}": entry for role, entry in made.items()}


def _write_gpt_oss(folder: Path) -> None:
    config = GPT_OSS
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, q, kv = 64, 64 * 64, 8 * 64
    shapes: Shapes = {"model.norm.weight": (hidden,)}
    shapes |= {name: _table(config) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    banks: dict[str, Entry] = {}
    for layer in range(config["num_hidden_layers"]):
        path, attention = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
        for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
            shapes |= {f"{attention}.{name}_proj.weight": (rows, columns), f"{attention}.{name}_proj.bias": (rows,)}
        shapes |= {
            f"{attention}.sinks": (heads,),
            f"{path}.input_layernorm.weight": (hidden,),
            f"{path}.post_attention_layernorm.weight": (hidden,),
            f"{path}.mlp.router.weight": (experts, hidden),
            f"{path}.mlp.router.bias": (experts,),
        }
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            bank, groups = f"{path}.mlp.experts.{name}", columns // 32
            shapes[f"{bank}_bias"] = (experts, rows)
            count = experts * rows * groups
            banks[f"{bank}_blocks"] = Entry(
                "U8", (experts, rows, groups, 16), partial(octets, f"{bank}_blocks", 16 * count)
            )
            banks[f"{bank}_scales"] = Entry("U8", (experts, rows, groups), partial(_exponents, count))
    write_entries(folder, config, _floats(shapes, {}) | banks)


def _exponents(count: int) -> Iterator[Any]:
    """Powers of two: 2⁻⁷ everywhere."""
    import numpy as np

    for start in range(0, count, 1 << 22):
        yield np.full(min(1 << 22, count - start), 120, np.uint8)


def octets(name: str, count: int) -> Iterator[Any]:
    """Random bytes."""
    import numpy as np

    return _random(name, count, np.uint8)


def scales(name: str, count: int) -> Iterator[Any]:
    """Random float16 between 2⁻⁸ and 2⁻⁷."""
    import numpy as np

    for bits in _random(name, count, np.uint16):
        yield bits & np.uint16(0x03FF) | np.uint16(0x1C00)


def _write_smol(folder: Path, source: Path) -> None:
    import ml_dtypes

    def pack(values: Any) -> dict[str, tuple[str, Any]]:
        codes, scales = _rounded(values, 4, ml_dtypes.bfloat16)
        return {"qweight": ("U8", codes[:, 0::2] | codes[:, 1::2] << 4), "scales": ("BF16", scales)}

    packing = {"quant_method": "olive", "bits": 4, "group_size": SMOL_GROUP, "symmetric": True}
    _write_rounded(folder, source, packing, ("bfloat16", "BF16", ml_dtypes.bfloat16), pack)


def _write_gptq_smol(folder: Path, source: Path, bits: int) -> None:
    import numpy as np

    def pack(values: Any) -> dict[str, tuple[str, Any]]:
        codes, scales = _rounded(values, bits, np.float16)
        outputs, groups = scales.shape
        # Version 1 stores the midpoint less one.
        zeros = np.full((groups, outputs * bits // 8), 0x77 if bits == 4 else 0x7F, np.uint8)
        return {
            "qweight": ("I32", np.ascontiguousarray(_words(codes, bits).T)),
            "qzeros": ("I32", zeros.view(np.int32)),
            "scales": ("F16", np.ascontiguousarray(scales.T)),
            "g_idx": ("I32", np.arange(values.shape[1], dtype=np.int32) // SMOL_GROUP),
        }

    packing = QUANTIZATION["gptq"] | {"bits": bits, "group_size": SMOL_GROUP, "checkpoint_format": "gptq"}
    _write_rounded(folder, source, packing, ("float16", "F16", np.float16), pack)


def _write_rounded(
    folder: Path,
    source: Path,
    packing: dict[str, Any],
    rest: tuple[str, str, Any],
    pack: Callable[[Any], dict[str, tuple[str, Any]]],
) -> None:
    """The demo model with every projection packed, and the rest in a dtype: its name, its tag, numpy's type."""
    from safetensors import safe_open

    entries: dict[str, Entry] = {}

    def add(name: str, dtype: str, values: Any) -> None:
        entries[name] = Entry(dtype, values.shape, lambda: iter([values.view("u1")]))

    dtype, tag, kind = rest
    with safe_open(weights(source), framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            values = file.get_tensor(name)
            if name.endswith(PACKED):
                for role, (stored, array) in pack(values).items():
                    add(name.replace(".weight", f".{role}"), stored, array)
            else:
                add(name, tag, values.astype(kind))
    config = json.loads((source / "config.json").read_text("utf-8"))
    write_entries(folder, config | {"torch_dtype": dtype, "quantization_config": packing}, entries)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)


def _rounded(values: Any, bits: int, dtype: Any) -> tuple[Any, Any]:
    """float32 [N, K] to the nearest of 2ᵇ - 1 steps a group: codes U8 [N, K] about 2ᵇ⁻¹, and scales [N, G]."""
    import numpy as np

    half = 1 << bits - 1
    groups = values.reshape(len(values), -1, SMOL_GROUP)
    scales = (np.abs(groups).max(-1) / (half - 1)).astype(dtype)
    steps = np.round(groups / np.maximum(scales.astype(np.float32), 1e-9)[..., None])
    return (np.clip(steps, -half, half - 1) + half).astype(np.uint8).reshape(values.shape), scales


def _words(codes: Any, bits: int) -> Any:
    """Codes [N, K], the first in the low bits, as int32 [N, K·b/32]."""
    import numpy as np

    octets = codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes
    return np.ascontiguousarray(octets).view(np.int32)


def _large_entries() -> dict[str, Entry]:
    return _floats(_shapes(LARGE) | {"lm_head.weight": _table(LARGE)}, {})


def _write_large(folder: Path, config: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
    weight_map = {}
    ordered, width = sorted(entries), -(-len(entries) // LARGE_SHARDS)
    for number, start in enumerate(range(0, len(ordered), width), 1):
        names = ordered[start : start + width]
        file = f"model-{number:05d}-of-{LARGE_SHARDS:05d}.safetensors"
        header, data = _header({name: entries[name] for name in names})
        with (folder / file).open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + data)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
GGUF_SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}
"""The types measured, and where a block's float16 scales lie."""


def _write_gguf(block_type: str, folder: Path) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    for key, value in {
        "block_count": WIDE["num_hidden_layers"],
        "context_length": 4096,
        "embedding_length": WIDE["hidden_size"],
        "feed_forward_length": WIDE["intermediate_size"],
        "attention.head_count": WIDE["num_attention_heads"],
        "attention.head_count_kv": WIDE["num_key_value_heads"],
        "attention.key_length": WIDE["head_dim"],
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    kind = gguf.GGMLQuantizationType[block_type]
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    for name, shape in _shapes(WIDE).items():
        stem, _, leaf = name.rpartition(".")
        layer, _, module = stem.removeprefix("model.layers.").partition(".")
        if module.endswith(("q_norm", "k_norm")):
            continue
        own = f"{GGUF_NAMES[stem]}.{leaf}" if stem in GGUF_NAMES else f"blk.{layer}.{GGUF_NAMES[module]}.{leaf}"
        if len(shape) == 1:
            writer.add_tensor(own, np.ones(shape, np.float32))
            continue
        blocks = np.concatenate(list(octets(name, math.prod(shape) // elements * nbytes))).reshape(-1, nbytes)
        for at in GGUF_SCALES[block_type]:
            blocks[:, at : at + 2] = np.concatenate(list(scales(name, len(blocks)))).view(np.uint8).reshape(-1, 2)
        writer.add_tensor(own, blocks.reshape(shape[0], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
