"""Matrices as nodes: multiplied by, and looked up in. Float as stored, or packed and kept packed, or 8-bit floats.

A packed matrix [N, K] in blocks of B elements with b bits: codes U8 [N, nb, B·b/8], scales [N, nb], zero points packed
like the codes, U8 [N, ceil(nb·b/8)], or none: 2**(b-1) everywhere. With minimums [N, nb] it is
(code - centre) · scale + offset, offset = centre · scale + minimum: the operators are given the first term, whose zero
points are the centre, and the second is a product of its own, with each block's sum of x.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from waybill.onnx.graph import MICROSOFT, Graph
from waybill.plan.parameter import AffinePacking, CodebookPacking, ParameterSpec, part_name
from waybill.weights.affine import CENTRES
from waybill.weights.dtypes import NUMPY_DTYPES

INT8_ACTIVATIONS = 4
"""accuracy_level: the product may round activations to 8 bits; an order of magnitude faster for 2 and 8 bits."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """Makes the nodes that use a parameter, by its declaration."""

    graph: Graph
    specs: Mapping[str, ParameterSpec]
    dtype: str
    accuracy_level: int
    served: Mapping[str, str] = field(default_factory=dict)
    """Tied parameters that another one serves for."""
    _made: dict[str, ir.Value] = field(default_factory=dict)
    """What several nodes use, by name: sums of blocks, and offsets."""

    def inside(self, branch: Graph) -> Matrices:
        """The same, in a branch of the graph."""
        return replace(self, graph=branch, _made={})

    def spec(self, name: str) -> ParameterSpec:
        """A parameter, or the one that serves for it."""
        return self.specs[self.served.get(name, name)]

    def product(self, name: str, x: ir.Value, weight: str, bias: str | None = None) -> ir.Value:
        """x Wᵀ + b, [..., K] -> [..., N]."""
        spec = self.spec(weight)
        added = self.vector(bias) if bias is not None and bias in self.specs else None
        if not isinstance(spec.packing, AffinePacking):
            return self._float_product(name, x, self._matrix(spec), added)
        rows, columns = spec.local_shape(0, 1)
        codes, scales, zeros = self.packed(spec, spec.packing)
        y = self.graph.op(
            f"{name}/codes" if spec.packing.minimums else name, "MatMulNBits", x, codes, scales, zeros, None, added,
            domain=MICROSOFT, K=columns, N=rows, bits=spec.packing.bits, block_size=spec.packing.group,
            accuracy_level=self.accuracy_level,
        )  # fmt: skip
        if not spec.packing.minimums:
            return y
        sums = self._block_sums(x, columns // spec.packing.group, spec.packing.group)
        rest = self._float_product(f"{name}/offset", sums, self._offsets(spec, spec.packing, scales), None)
        return self.graph.op(name, "Add", y, rest)

    def _offsets(self, spec: ParameterSpec, packing: AffinePacking, scales: ir.Value) -> ir.Value:
        """[N, nb], of a weight with minimums: what the centre of its codes means. A session computes them once, when it
        opens."""
        name, shape = part_name(spec.name, "offsets"), spec.local_shape(0, 1)
        if name not in self._made:
            minimums = self.graph.parameter(
                part_name(spec.name, "minimums"), self.dtype, (shape[0], shape[1] // packing.group)
            )
            centre = self.graph.constant(CENTRES[packing.bits], NUMPY_DTYPES[self.dtype].type)
            above = self.graph.op(f"{name}/centre", "Mul", scales, centre)
            self._made[name] = self.graph.op(name, "Add", above, minimums)
        return self._made[name]

    def _block_sums(self, x: ir.Value, blocks: int, size: int) -> ir.Value:
        """[B, S, K] -> [B, S, nb]."""
        name = f"{x.name}/sums_of_{size}"
        if name not in self._made:
            by_block = self.graph.op(f"{name}/blocks", "Reshape", x, self.graph.constant([0, 0, blocks, size]))
            self._made[name] = self.graph.op(name, "ReduceSum", by_block, self.graph.constant([-1]), keepdims=0)
        return self._made[name]

    def _matrix(self, spec: ParameterSpec) -> ir.Value:
        """[N, K] in floats: as it is, or made of 8-bit floats and the scales of each row, exactly."""
        rows, columns = shape = spec.local_shape(0, 1)
        if not isinstance(spec.packing, CodebookPacking):
            return self.graph.parameter(spec.name, self.dtype, shape)
        layout = spec.packing.layout
        codes = self.graph.parameter(part_name(spec.name, "codes"), f"F8_{layout.table}", shape)
        blocks = -(-columns // layout.columns)
        scales = self.graph.parameter(part_name(spec.name, "scales"), self.dtype, (rows, blocks))
        return self.graph.op(
            f"{spec.name}/values", "DequantizeLinear", codes, scales, axis=1, block_size=layout.columns
        )

    def _float_product(self, name: str, x: ir.Value, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
        """By a weight [N, K], as Hugging Face stores it: nothing is transposed, and a tied head is the embedding."""
        label = name if bias is None else f"{name}/product"
        if self.dtype == "F32":
            y = self.graph.op(label, "FusedMatMul", x, weight, domain=MICROSOFT, transB=1)
        else:  # FusedMatMul has no 16-bit kernel on the CPU
            turned = self.graph.op(f"{name}/transposed", "Transpose", weight, perm=[1, 0])
            y = self.graph.op(label, "MatMul", x, turned)
        return y if bias is None else self.graph.op(name, "Add", y, bias)

    def rows(self, name: str, ids: ir.Value, weight: str) -> ir.Value:
        """Rows of a table, [...] -> [..., K]."""
        spec = self.spec(weight)
        weight = spec.name
        if not isinstance(spec.packing, AffinePacking):
            return self.graph.op(name, "Gather", self.graph.parameter(weight, self.dtype, spec.local_shape(0, 1)), ids)
        packing = spec.packing
        rows, columns = spec.local_shape(0, 1)
        blocks = columns // packing.group
        codes = self.graph.parameter(f"{part_name(weight, 'codes')}.rows", "U8", (rows, columns * packing.bits // 8))
        scales = self.graph.parameter(part_name(weight, "scales"), self.dtype, (rows, blocks))
        # The default zero point depends on the runtime's version and the data's type: it is always written out.
        zeros = self.graph.parameter(part_name(weight, "zero_points"), "U8", (rows, zero_bytes(blocks, packing.bits)))
        values = self.graph.op(
            f"{name}/codes" if packing.minimums else name, "GatherBlockQuantized", codes, ids, scales, zeros,
            domain=MICROSOFT, gather_axis=0, quantize_axis=1, bits=packing.bits, block_size=packing.group,
        )  # fmt: skip
        if not packing.minimums:
            return values
        graph, shape = self.graph, [0, 0, blocks, packing.group]
        offsets = graph.op(f"{name}/offsets", "Gather", self._offsets(spec, packing, scales), ids)
        rest = graph.op(f"{name}/of_blocks", "Unsqueeze", offsets, graph.constant([-1]))
        y = graph.op(f"{name}/sum", "Add", graph.op(f"{name}/blocks", "Reshape", values, graph.constant(shape)), rest)
        return graph.op(name, "Reshape", y, graph.constant([0, 0, columns]))

    def packed(self, spec: ParameterSpec, packing: AffinePacking) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Codes, scales and zero points of a matrix or a bank."""
        *rows, columns = spec.local_shape(0, 1)
        blocks = -(-columns // packing.group)
        octets = packing.group * packing.bits // 8
        bank = spec.kind == "experts"  # a bank's rows are plain bytes
        shape = (*rows, blocks * octets) if bank else (*rows, blocks, octets)
        codes = self.graph.parameter(part_name(spec.name, "codes"), "U8", shape)
        scales = self.graph.parameter(part_name(spec.name, "scales"), self.dtype, (*rows, blocks))
        if not packing.zero_points:
            return codes, scales, None
        name = part_name(spec.name, "zero_points")
        return codes, scales, self.graph.parameter(name, "U8", (*rows, zero_bytes(blocks, packing.bits)))

    def vector(self, name: str) -> ir.Value:
        """A norm's weight, a bias, or a convolution's kernel: any shape."""
        return self.graph.parameter(name, self.dtype, self.specs[name].local_shape(0, 1))

    def bank(self, name: str) -> ir.Value:
        """A float bank [E, N, K]."""
        return self.graph.parameter(name, self.dtype, self.specs[name].local_shape(0, 1))


def zero_bytes(blocks: int, bits: int) -> int:
    """Bytes of one row's zero points."""
    return math.ceil(blocks * bits / 8)
