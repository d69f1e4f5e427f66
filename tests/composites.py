"""Packed checkpoints of models of several networks, made on the spot: each component in a layout of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

import waybill
from checkpoints import Array, Recipe
from drivers import Driver
from packing import Scheme, Twins, dequantize, metadata, quantize, sidecars
from zoo import STEPS, Tiny, reference

TABLES = ("embed_tokens.weight", "lm_head.weight", "position_embedding.weight", "embed_positions.weight")
"""Matrices by shape that producers leave alone unless told."""


def pack_components(tensors: Mapping[str, Array], layouts: Mapping[str, Scheme], owner: Callable[[str], str]) -> Twins:
    """The linear weights of every component that has a layout, packed; and the twin they must equal.

    Both recipes hold weights as stored; the packed one's config holds `component_quantization` and nothing else.

    Args:
        tensors: a checkpoint's weights in float32, by stored name.
        layouts: component name to how it is packed; a component without one is float.
        owner: the component that owns a stored weight.
    """
    packed, dense = Recipe({}), Recipe({})
    for name, tensor in tensors.items():
        scheme = layouts.get(owner(name))
        if scheme is None or tensor.ndim != 2 or not name.endswith(".weight") or name.endswith(TABLES):
            packed.tensors[name] = dense.tensors[name] = tensor
            continue
        codes, zeros, scales = quantize(tensor, scheme)
        dense.tensors[name] = dequantize(codes, zeros, scales, scheme.group)
        packed.tensors |= sidecars(name, codes, zeros, scales, scheme)
    packed.config["component_quantization"] = {
        name: metadata(scheme, (), {}, table=False, head=False, moe=False, tie=False)
        for name, scheme in layouts.items()
    }
    return Twins(packed, dense)


def assert_equal_to_transformers(tiny: Tiny, packed: Recipe, dense: Recipe, folder: Path) -> Driver:
    """A packed checkpoint as a package: logits, tokens and proof, against transformers on its float twin."""
    expected, tokens = reference(tiny.load(dense, folder / "dense"), tiny)
    waybill.build(packed.write(folder / "packed"), exact=True).save(folder / "package")
    driver = Driver(folder / "package")
    inputs = {name: values.numpy() for name, values in tiny.inputs.items()}
    logits, made = driver.steps(inputs, inputs[tiny.grows], STEPS, tiny.first, tiny.never)
    assert np.abs(logits - expected).max() < 2e-4 * max(np.abs(expected).max(), 1)
    np.testing.assert_array_equal(made, tokens)
    assert waybill.verify(folder / "package", folder / "packed").problems == []
    return driver
