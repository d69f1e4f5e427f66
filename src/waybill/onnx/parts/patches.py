"""A picture as a sequence of patches.

N pictures of C channels, P patches of each, D hidden elements.
"""

from __future__ import annotations

import onnx_ir as ir

from waybill.onnx.matrix import Matrices
from waybill.onnx.parts.convolution import convolve


def patch_embeddings(matrices: Matrices, path: str, pixels: ir.Value, size: int) -> ir.Value:
    """[N, C, height, width] -> [N, P or P + 1, D]: patches row by row, after a class embedding if there is one, each
    with the embedding of its position.

    `path` is the module's: patches are cut by `{path}.patch_embedding`, squares of `size` pixels; positions are rows
    of `{path}.position_embedding.weight`; the class embedding is `{path}.class_embedding`.
    """
    graph, patch = matrices.graph, f"{path}.patch_embedding"
    grid = convolve(matrices, patch, pixels, f"{patch}.weight", f"{patch}.bias", stride=(size, size))
    columns = graph.op(f"{patch}/columns", "Reshape", grid, graph.constant([0, 0, -1]))
    patches = graph.op(f"{patch}/rows", "Transpose", columns, perm=[0, 2, 1])
    name = f"{path}.class_embedding"
    if name in matrices.specs:
        count = graph.op(f"{name}/count", "Shape", pixels, start=0, end=1)
        shape = graph.op(f"{name}/shape", "Concat", count, graph.constant([1, 1]), axis=0)
        first = graph.op(f"{name}/rows", "Expand", matrices.vector(name), shape)
        patches = graph.op(f"{path}/sequence", "Concat", first, patches, axis=1)
    return graph.op(path, "Add", patches, matrices.vector(f"{path}.position_embedding.weight"))
