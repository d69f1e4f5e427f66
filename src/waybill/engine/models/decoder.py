"""The decoder that Llama, Qwen2, Qwen3, their MoEs and GPT-OSS share; the config says in which switches they differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from waybill.config import ModelConfig
from waybill.engine.context import get_global_ctx
from waybill.engine.distributed import TPInfo, all_agree
from waybill.engine.layers.attention import RopeAttention
from waybill.engine.layers.base import BaseOP, OPList, Parameters
from waybill.engine.layers.biased_experts import BiasedMoE
from waybill.engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from waybill.engine.layers.matrix import FloatMatrix, PackedMatrix
from waybill.engine.layers.mlp import GatedMLP, MoEMLP
from waybill.engine.layers.norm import RMSNorm
from waybill.engine.layers.rotary import Rotary
from waybill.errors import Refused
from waybill.families.decoder import EMBEDDING, HEAD
from waybill.plan.parameter import Packing


class DecoderLayer(BaseOP):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, parameters: Parameters, layer: int) -> None:
        path = f"model.layers.{layer}"
        self.input_layernorm = RMSNorm(parameters, f"{path}.input_layernorm")
        self.self_attn = RopeAttention(parameters, f"{path}.self_attn", layer)
        self.post_attention_layernorm = RMSNorm(parameters, f"{path}.post_attention_layernorm")
        self.mlp = _feed_forward(parameters, f"{path}.mlp", layer)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        x = x + self.self_attn.forward(self.input_layernorm.forward(x), angles)
        return x + self.mlp.forward(self.post_attention_layernorm.forward(x))


def _feed_forward(parameters: Parameters, path: str, layer: int) -> GatedMLP | MoEMLP | BiasedMoE:
    config = parameters.config
    if not config.is_moe_layer(layer):
        return GatedMLP(parameters, path)
    return BiasedMoE(parameters, path, config.swiglu) if config.swiglu else MoEMLP(parameters, path)


class DecoderModel(BaseOP):
    """Embedding, layers, final norm."""

    def __init__(self, parameters: Parameters) -> None:
        config = parameters.config
        self.embed_tokens = VocabParallelEmbedding(parameters)
        self.layers = OPList([DecoderLayer(parameters, layer) for layer in range(config.num_layers)])
        self.norm = RMSNorm(parameters, "model.norm")
        self._rotary = Rotary(config.rotary_config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden]."""
        x = self.embed_tokens.forward(ids)
        angles = self._rotary.angles(get_global_ctx().batch.positions, x.dtype)
        for layer in self.layers.op_list:
            x = layer.forward(x, angles)
        return self.norm.forward(x)


class CausalLM(BaseOP):
    """A decoder with an output head, in one float dtype."""

    def __init__(self, config: ModelConfig, tp: TPInfo, packings: Mapping[str, Packing]) -> None:
        parameters = Parameters(config, tp, packings)
        self.config = config
        self.dtype = torch.get_default_dtype()
        self.model = DecoderModel(parameters)
        self.lm_head = ParallelLMHead(parameters, self.model.embed_tokens)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.norm.weight.device

    def forward(self) -> torch.Tensor:
        """Logits `[B, vocab]` of each request's last position; the batch comes from the global context."""
        return self.lm_head.forward(self.model.forward(get_global_ctx().batch.input_ids))

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """As every layer does; a head stored for a tied model is dropped when equal, honoured when not."""
        stem, table = HEAD.removesuffix("weight"), EMBEDDING.removesuffix("weight")
        head = {name: tensor for name, tensor in state.items() if name.startswith(stem)}
        pairs = [(tensor, state.get(table + name.removeprefix(stem))) for name, tensor in head.items()]
        if not self.lm_head.is_tied or not head or any(other is None for _, other in pairs):
            super().load_state_dict(state)
            return
        same = all(other is not None and a.shape == other.shape and torch.equal(a, other) for a, other in pairs)
        if all_agree(same):
            super().load_state_dict({name: tensor for name, tensor in state.items() if name not in head})
            return
        self.lm_head.untie()
        try:
            super().load_state_dict(state)
        except Refused:
            self.lm_head.retie()
            raise

    def prepare(self) -> None:
        """Give packed weights the form their products are computed from; once, after loading."""
        table = self.model.embed_tokens.matrix  # looked up in, and multiplied by where it is the head
        for op in self.descendants():
            if isinstance(op, PackedMatrix) and (op is not table or self.lm_head.is_tied):
                op.prepare(keep=op is table)
            elif isinstance(op, FloatMatrix) and op is not table:
                op.prepare()
