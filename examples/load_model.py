"""From config.json to a model that can compute: what a checkpoint is, an empty model, its weights as a stream.

python examples/load_model.py FOLDER
"""

from __future__ import annotations

import sys
import time

import torch

from waybill.engine import (
    Batch,
    ModelConfig,
    cached_load_hf_config,
    create_model,
    get_global_ctx,
    load_weight,
    set_rope_device,
    set_tp_info,
    torch_dtype,
)

folder = sys.argv[1]
set_tp_info(0, 1)
set_rope_device(torch.device("cpu"))
config = ModelConfig.from_hf(cached_load_hf_config(folder))
print(
    f"{config.num_layers} layers, {config.num_qo_heads} q heads, {config.num_kv_heads} kv heads, "
    f"head_dim {config.head_dim}, hidden {config.hidden_size}, vocab {config.vocab_size}"
)
print(
    f"RoPE base {config.rotary_config.base:.0f}, tied embeddings {config.tie_word_embeddings}, "
    f"architecture {config.architectures[0]}"
)

start = time.perf_counter()
weights = {}
for i, (name, tensor) in enumerate(load_weight(folder, torch.device("cpu"))):
    if i < 6:
        print(f"  yield {name:<48} {tuple(tensor.shape)}")
    weights[name] = tensor
print(f"streaming {len(weights)} tensors: {time.perf_counter() - start:.2f} s")

start = time.perf_counter()
with torch.device("meta"), torch_dtype(tensor.dtype):
    model = create_model(config)
print(
    f"building the model on the meta device: {(time.perf_counter() - start) * 1e3:.0f} ms, "
    f"{len(model.state_dict())} weight tensors"
)
model.load_state_dict(weights)
qkv = model.model.layers.op_list[0].self_attn.qkv_proj.weight
print("qkv_proj after loading:", tuple(qkv.shape), qkv.dtype, qkv.device)

batch = Batch(torch.tensor([1, 2, 3]), lengths=(3,))
with torch.inference_mode(), get_global_ctx().forward_batch(batch):
    logits = model.forward()
print("logits of the last position:", tuple(logits.shape), "most likely next token:", int(logits.argmax()))
