"""The demo model as an ordinary Hugging Face folder of floats, for tests and benchmarks: the peers read no other.

`python -m scripts.unpack_smollm2` prints the folder. It is made by `gguf`; nothing of this library takes part.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.smollm2 import gguf_file

NAME = "SmolLM2-135M-Instruct"
GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_folder() -> Path:
    """Where the unpacked model lies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "waybill" / NAME


def unpacked() -> Path:
    """The model's folder, made on the first call; processes wait for the one making it."""
    folder = cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    return made(folder, lambda staging: _unpack(gguf_file(), staging))


def made(folder: Path, make: Callable[[Path], Path]) -> Path:
    """A folder that is made on the first call; processes wait for the one making it.

    `make` is given a staging folder to fill, and says what of it becomes the folder.
    """
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").exists():
            staging = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
            staging.mkdir()
            try:
                whole = make(staging)
                shutil.rmtree(folder, ignore_errors=True)
                whole.rename(folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    return folder


def _unpack(source: Path, folder: Path) -> Path:
    import gguf
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items() if field.types}
    heads = {"q": fields["llama.attention.head_count"], "k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = _half_split(value, heads[name[-13]])
        tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file, content in (
        ("tokenizer.json", _tokenizer(fields)),
        ("tokenizer_config.json", _tokenizer_config(fields)),
        ("generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}),
        ("config.json", _config(fields)),  # last: its presence marks a whole folder
    ):
        (folder / file).write_text(json.dumps(content, ensure_ascii=False, indent=1), "utf-8")
    return folder


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{GGUF_NAMES[parts[2]]}.{parts[3]}"
    return f"{GGUF_NAMES[parts[0]]}.{parts[1]}"


def _half_split(weight: Any, heads: int) -> Any:
    """GGUF's llama stores rotary pairs side by side, Hugging Face half a head apart: [h, D/2, 2] -> [h, 2, D/2]."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns).copy()


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 10),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return dict(json.loads(tokenizer.to_str()))


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


if __name__ == "__main__":
    print(unpacked())
