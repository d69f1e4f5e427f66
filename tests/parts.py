"""Parts of graphs, each alone in a model: opened in ONNX Runtime, and called with arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from checkpoints import Array
from waybill.onnx.graph import IR_DTYPES, TAGS, Graph
from waybill.onnx.matrix import Matrices
from waybill.plan.parameter import ParameterSpec, Part

Weights = Mapping[str, Array]
Values = ir.Value | Sequence[ir.Value]
TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(np.float16): 2e-2}


def rand(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    """Normal numbers; the same for the same shape and seed."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


class Model:
    """A part with its weights, open in a session: called with its inputs in order, it gives its outputs."""

    def __init__(self, build: Callable[..., Values], inputs: Sequence[Array], weights: Weights | None = None) -> None:
        weights = weights or {}
        specs = {
            name: ParameterSpec(name=name, kind="vector", parts=(Part(values.shape, None, ""),))
            for name, values in weights.items()
        }
        floats = [a for a in (*inputs, *weights.values()) if a.dtype.kind == "f"]
        dtype = TAGS[ir.DataType.from_numpy(floats[0].dtype)] if floats else "F32"
        self.graph = Graph()
        self.matrices = Matrices(self.graph, specs, dtype, 0)
        given = []
        for at, array in enumerate(inputs):
            tag = TAGS[ir.DataType.from_numpy(array.dtype)]
            given.append(self.graph.input(f"in{at}", tag, [f"in{at}_{axis}" for axis in range(array.ndim)]))
        made = build(self.matrices, *given)
        for value in [made] if isinstance(made, ir.Value) else made:
            value.type = ir.TensorType(IR_DTYPES[dtype])
            self.graph.outputs.append(value)
        tensors = {name: ir.tensor(weights[name], name=name) for name in self.graph.parameters}
        octets = ir.to_proto(self.graph.finish("part", tensors)).SerializeToString()
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session = ort.InferenceSession(octets, options, providers=["CPUExecutionProvider"])

    def __call__(self, *inputs: Array) -> list[Array]:
        made: list[Array] = self.session.run(None, {f"in{at}": array for at, array in enumerate(inputs)})
        return made


def close(made: Array, expected: torch.Tensor) -> bool:
    """The same to the last digits that the dtype holds."""
    assert made.shape == tuple(expected.shape)
    tolerance = TOLERANCE[made.dtype]
    return bool(np.allclose(made.astype(np.float32), expected.detach().numpy(), rtol=tolerance, atol=tolerance))


def tensor(values: Array) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))
