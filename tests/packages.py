"""Tiny ONNX packages, built node by node and independently of the exporter: the contract a package has to keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from checkpoints import Array, Recipe, write_tokenizer

ORT = "com.microsoft"


def write_package(
    folder: Path, recipe: Recipe, *, dtype: Any = np.float32, last_only: bool = False, **settings: Any
) -> Path:
    """A Llama recipe as a package that computes in `dtype`; `settings` change or add fields of the model's config."""
    folder.mkdir(parents=True, exist_ok=True)
    ir.save(_Graph(recipe, dtype).build(last_only), folder / "model.onnx", external_data="model.onnx.data")
    config = recipe.config
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    model = {
        "type": "llama",
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "decoder": {
            "filename": "model.onnx",
            "head_size": head_dim,
            "hidden_size": config["hidden_size"],
            "num_attention_heads": config["num_attention_heads"],
            "num_hidden_layers": config["num_hidden_layers"],
            "num_key_value_heads": config["num_key_value_heads"],
            "session_options": {"intra_op_num_threads": 1},  # tiny models gain nothing from threads
        },
    }
    search = {"past_present_share_buffer": True}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "genai_config.json").write_text(json.dumps({"model": model | settings, "search": search}))
    return write_tokenizer(folder)


class _Graph:
    """The nodes of a Llama decoder around GroupQueryAttention."""

    def __init__(self, recipe: Recipe, dtype: Any) -> None:
        self.config = recipe.config
        self.weights = {name: tensor.astype(dtype) for name, tensor in recipe.tensors.items()}
        self.dtype = np.dtype(dtype)
        self.kind = ir.DataType.from_numpy(self.dtype)
        self.nodes: list[ir.Node] = []
        self.inputs: list[ir.Value] = []
        self.constants: dict[str, ir.Value] = {}

    def op(self, kind: str, *inputs: ir.Value | None, domain: str = "", outputs: int = 1, **attributes: Any) -> Any:
        node = ir.node(kind, inputs, attributes, domain=domain, num_outputs=outputs)
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else node.outputs

    def constant(self, array: Array) -> ir.Value:
        name = f"c{len(self.constants)}"
        tensor = ir.tensor(np.ascontiguousarray(array), name=name)
        self.constants[name] = ir.Value(
            name=name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        return self.constants[name]

    def input(self, name: str, kind: ir.DataType, *shape: int | str) -> ir.Value:
        self.inputs.append(ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape)))
        return self.inputs[-1]

    def linear(self, x: ir.Value, name: str) -> ir.Value:
        return self.op("MatMul", x, self.constant(self.weights[f"{name}.weight"].T))

    def norm(self, x: ir.Value, name: str) -> ir.Value:
        scale = self.constant(self.weights[f"{name}.weight"])
        epsilon = float(self.config["rms_norm_eps"])
        return self.op("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=epsilon, stash_type=1)

    def build(self, last_only: bool) -> ir.Model:
        config = self.config
        ids = self.input("input_ids", ir.DataType.INT64, "batch", "new")
        mask = self.input("attention_mask", ir.DataType.INT64, "batch", "total")
        axis = self.constant(np.array([1]))
        self.ends = self.op("Sub", self.op("ReduceSum", mask, axis, keepdims=0), axis)
        self.seqlens = self.op("Cast", self.ends, to=int(ir.DataType.INT32))
        shape = self.op("Gather", self.op("Shape", mask), self.constant(np.array(1)))
        self.total = self.op("Cast", shape, to=int(ir.DataType.INT32))
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        powers = config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
        angles = np.arange(config["max_position_embeddings"])[:, None] * powers
        self.rotary = [self.constant(f(angles).astype(self.dtype)) for f in (np.cos, np.sin)]
        embedding = self.constant(self.weights["model.embed_tokens.weight"])
        hidden = self.op("Gather", embedding, ids)
        presents: list[ir.Value] = []
        for layer in range(config["num_hidden_layers"]):
            path = f"model.layers.{layer}"
            attended, *present = self.attention(self.norm(hidden, f"{path}.input_layernorm"), layer, head_dim)
            hidden = self.op("Add", hidden, attended)
            hidden = self.op("Add", hidden, self.mlp(self.norm(hidden, f"{path}.post_attention_layernorm"), path))
            presents += present
        if last_only:
            hidden = self.last(hidden, ids)
        logits = self.linear(self.norm(hidden, "model.norm"), "lm_head")
        self.declare(logits, "logits", "batch", "positions", config["vocab_size"])
        graph = ir.Graph(
            self.inputs, [logits, *presents], nodes=self.nodes, initializers=list(self.constants.values()),
            opset_imports={"": 21, ORT: 1}, name="tiny",
        )  # fmt: skip
        return ir.Model(graph, ir_version=10)

    def attention(self, x: ir.Value, layer: int, head_dim: int) -> list[ir.Value]:
        kv, path = self.config["num_key_value_heads"], f"model.layers.{layer}.self_attn"
        pasts = [
            self.input(f"past_key_values.{layer}.{part}", self.kind, "batch", kv, "past", head_dim)
            for part in ("key", "value")
        ]
        mixed, *presents = self.op(
            "GroupQueryAttention", *(self.linear(x, f"{path}.{p}_proj") for p in "qkv"), *pasts, self.seqlens,
            self.total, *self.rotary, domain=ORT, outputs=3, num_heads=self.config["num_attention_heads"],
            kv_num_heads=kv, do_rotary=1,
        )  # fmt: skip
        for part, present in zip(("key", "value"), presents, strict=True):
            self.declare(present, f"present.{layer}.{part}", "batch", kv, "length", head_dim)
        return [self.linear(mixed, f"{path}.o_proj"), *presents]

    def mlp(self, x: ir.Value, path: str) -> ir.Value:
        gate = self.linear(x, f"{path}.mlp.gate_proj")
        gated = self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), self.linear(x, f"{path}.mlp.up_proj"))
        return self.linear(gated, f"{path}.mlp.down_proj")

    def last(self, hidden: ir.Value, ids: ir.Value) -> ir.Value:
        """The hidden state of each row's last real token; when decoding there is one."""
        one = self.constant(np.array(1))
        newest = self.op("Sub", self.op("Gather", self.op("Shape", ids), one), one)
        index = self.op("Unsqueeze", self.op("Min", self.ends, newest), self.constant(np.array([1, 2])))
        return self.op("GatherND", hidden, index, batch_dims=1)

    def declare(self, value: ir.Value, name: str, *shape: int | str) -> None:
        value.name, value.type, value.shape = name, ir.TensorType(self.kind), ir.Shape(shape)
