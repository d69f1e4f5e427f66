"""Routed experts as one operator: MoE for float banks, QMoE for packed ones.

Both want the rows of gate and up interleaved (`swiglu_fusion` 1), raw router logits, and take the softmax themselves.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from waybill.config import ModelConfig
from waybill.onnx.graph import MICROSOFT
from waybill.onnx.matrix import Matrices
from waybill.plan.parameter import AffinePacking

ROUTER_WEIGHTS = 14
"""QMoE's input for weights computed outside."""


def gated(matrices: Matrices, path: str, x: ir.Value, y: ir.Value) -> ir.Value:
    """σ(gate(x)) · y, [B, S, H]: what every token is given beside its chosen experts' answers, one number a token."""
    graph = matrices.graph
    share = graph.op(f"{path}.share", "Sigmoid", matrices.product(path, x, f"{path}.weight"))
    return graph.op(f"{path}.product", "Mul", share, y)


def routed(matrices: Matrices, config: ModelConfig, path: str, x: ir.Value) -> ir.Value:
    """Σ over a token's chosen experts of weight · expert(x), [B, S, H] -> [B, S, H]."""
    graph = matrices.graph
    biased = config.swiglu is not None
    gate, suffix = (f"{path}.router", ".weight") if biased else (f"{path}.gate", "")
    scores = matrices.product(gate, x, f"{gate}.weight", f"{gate}.bias")
    logits = graph.op(f"{path}.logits", "Reshape", scores, graph.constant([-1, config.num_experts]))
    names = [f"{path}.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    first, second = (matrices.specs[f"{name}{suffix}"] for name in names)
    bias1, bias2 = (matrices.vector(f"{name}.bias") if biased else None for name in names)
    swiglu: dict[str, Any] = {
        "k": config.num_experts_per_tok,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
        "normalize_routing_weights": int(config.norm_topk_prob),
    }
    if config.swiglu is not None:
        alpha, limit = config.swiglu
        swiglu |= {"activation_alpha": alpha, "activation_beta": 1.0, "swiglu_limit": limit}
    if not isinstance(first.packing, AffinePacking) or not isinstance(second.packing, AffinePacking):
        banks = (matrices.bank(first.name), bias1, matrices.bank(second.name), bias2)
        return graph.op(f"{path}.experts", "MoE", x, logits, *banks, domain=MICROSOFT, **swiglu)
    codes1, scales1, zeros1 = matrices.packed(first, first.packing)
    codes2, scales2, zeros2 = matrices.packed(second, second.packing)
    inputs: list[ir.Value | None] = [x, logits, codes1, scales1, bias1, codes2, scales2, bias2, None, None, None]
    inputs += [zeros1, zeros2]
    if not config.norm_topk_prob:
        # The packed kernel renormalizes whatever the attribute says, unless it is given the weights.
        inputs += [None] * (ROUTER_WEIGHTS - len(inputs))
        inputs.append(graph.op(f"{path}.probabilities", "Softmax", logits, axis=-1))
    widths: dict[str, int] = {"expert_weight_bits": first.packing.bits}
    if first.packing.bits != second.packing.bits:
        widths = {
            "expert_weight_bits": 4,
            "fc1_expert_weight_bits": first.packing.bits,
            "fc2_expert_weight_bits": second.packing.bits,
            "fc3_expert_weight_bits": first.packing.bits,
        }
    return graph.op(
        f"{path}.experts", "QMoE", *inputs, domain=MICROSOFT,
        **swiglu, **widths, block_size=first.packing.group, weights_prepacked=0, accuracy_level=matrices.accuracy_level,
    )  # fmt: skip
