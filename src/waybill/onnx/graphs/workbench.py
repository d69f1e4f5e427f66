"""What every graph of a package is made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from waybill.onnx.graph import Graph
from waybill.onnx.matrix import INT8_ACTIVATIONS, Matrices
from waybill.onnx.options import Options
from waybill.plan.parameter import ParameterSpec


@dataclass(frozen=True, slots=True)
class Workbench:
    """A package's parameters by name, which of them serve for tied ones, and what the export decides."""

    specs: Mapping[str, ParameterSpec]
    served: Mapping[str, str]
    dtype: str
    options: Options

    def matrices(self) -> Matrices:
        """A new graph, and what makes nodes in it that use parameters."""
        level = 0 if self.options.exact or self.options.ep != "cpu" else INT8_ACTIVATIONS
        return Matrices(Graph(), self.specs, self.dtype, level, self.served)

    def logits(self, matrices: Matrices, x: ir.Value, head: str, vocab_size: int) -> None:
        """The last product of a decoder's graph, which becomes its first output."""
        graph = matrices.graph
        made = matrices.product(head.removesuffix(".weight"), x, head)
        positions: int | str = "sequence_length" if self.options.all_logits else 1
        graph.output(made, "logits", self.dtype, ("batch_size", positions, vocab_size))
        graph.outputs.insert(0, graph.outputs.pop())  # before the caches
