"""Parts of graphs, each alone in a model of random weights, against what they stand for in torch and transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from transformers.activations import ACT2FN

from parts import Model, close, rand, tensor
from waybill.onnx.gate import needs
from waybill.onnx.graph import Graph
from waybill.onnx.parts.activation import ACTIVATIONS, activate
from waybill.onnx.parts.convolution import convolve
from waybill.onnx.parts.norm import layer_norm, layer_norm_of_sum, rms_norm, rms_norm_of_sum

EPSILON = 1e-5

dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])


# Norms and activations.


@dtypes
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_a_layer_norm_is_that_of_torch(dtype: Any, biased: bool) -> None:
    x, weights = (
        rand(2, 3, 32, dtype=dtype),
        {"n.weight": rand(32, dtype=dtype), "n.bias": rand(32, dtype=dtype, seed=1)},
    )
    if not biased:
        del weights["n.bias"]
    wanted = F.layer_norm(tensor(x), (32,), *map(tensor, weights.values()), eps=EPSILON)
    assert close(Model(lambda m, x: layer_norm(m, "n", x, EPSILON), [x], weights)(x)[0], wanted)


@dtypes
def test_an_rms_norm_is_that_of_torch(dtype: Any) -> None:
    x, weight = rand(2, 3, 32, dtype=dtype), rand(32, dtype=dtype)
    wanted = F.rms_norm(tensor(x), (32,), tensor(weight), EPSILON)
    assert close(Model(lambda m, x: rms_norm(m, "n", x, EPSILON), [x], {"n.weight": weight})(x)[0], wanted)


@dtypes
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_a_layer_norm_of_a_sum_gives_the_sum_too(dtype: Any, biased: bool) -> None:
    x, y = rand(2, 3, 32, dtype=dtype), rand(2, 3, 32, dtype=dtype, seed=1)
    weights = {"n.weight": rand(32, dtype=dtype)} | ({"n.bias": rand(32, dtype=dtype, seed=1)} if biased else {})
    normed, total = Model(lambda m, x, y: layer_norm_of_sum(m, "n", x, y, EPSILON), [x, y], weights)(x, y)
    wanted = tensor(x) + tensor(y)
    assert close(total, wanted)
    assert close(normed, F.layer_norm(wanted, (32,), *map(tensor, weights.values()), eps=EPSILON))


@dtypes
def test_an_rms_norm_of_a_sum_gives_the_sum_too(dtype: Any) -> None:
    x, y, weight = rand(2, 3, 32, dtype=dtype), rand(2, 3, 32, dtype=dtype, seed=1), rand(32, dtype=dtype)
    normed, total = Model(lambda m, x, y: rms_norm_of_sum(m, "n", x, y, EPSILON), [x, y], {"n.weight": weight})(x, y)
    wanted = tensor(x) + tensor(y)
    assert close(total, wanted)
    assert close(normed, F.rms_norm(wanted, (32,), tensor(weight), EPSILON))


@dtypes
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_what_transformers_means_by_its_name(name: str, dtype: Any) -> None:
    x = np.linspace(-6, 6, 121, dtype=dtype)
    assert close(Model(lambda m, x: activate(m.graph, "y", x, name), [x])(x)[0], ACT2FN[name](tensor(x)))


def test_an_exact_gelu_is_not_an_approximate_one() -> None:
    x = np.linspace(-6, 6, 121, dtype=np.float32)
    made = [
        Model(lambda m, x, f=f: activate(m.graph, "y", x, f), [x])(x)[0] for f in ("gelu", "gelu_new", "quick_gelu")
    ]
    assert np.abs(made[0] - made[1]).max() > 1e-4
    assert np.abs(made[0] - made[2]).max() > 1e-2


def test_an_activation_without_nodes_is_refused_by_its_name() -> None:
    graph = Graph()
    with pytest.raises(ValueError, match="no activation is named 'mish'; known are silu, gelu, "):
        activate(graph, "y", graph.input("x", "F32", [1]), "mish")


# Convolutions.


@dtypes
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (2, 0), (3, 2)])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_a_convolution_over_time_is_that_of_torch(dtype: Any, stride: int, padding: int, biased: bool) -> None:
    x = rand(2, 8, 21, dtype=dtype)
    weights = {"c.weight": rand(12, 8, 3, dtype=dtype) * dtype(0.2)} | (
        {"c.bias": rand(12, dtype=dtype)} if biased else {}
    )
    model = Model(
        lambda m, x: convolve(m, "c", x, "c.weight", "c.bias", stride=(stride,), padding=(padding,)), [x], weights
    )
    assert close(model(x)[0], F.conv1d(tensor(x), *map(tensor, weights.values()), stride=stride, padding=padding))


@dtypes
def test_patches_of_images_are_convolved_as_in_torch(dtype: Any) -> None:
    x = rand(2, 3, 28, 42, dtype=dtype)
    weights = {"c.weight": rand(12, 3, 14, 14, dtype=dtype) * dtype(0.05), "c.bias": rand(12, dtype=dtype)}
    model = Model(lambda m, x: convolve(m, "c", x, "c.weight", "c.bias", stride=(14, 14)), [x], weights)
    assert close(model(x)[0], F.conv2d(tensor(x), *map(tensor, weights.values()), stride=14))


def test_the_gate_asks_for_a_kernel_in_its_own_shape() -> None:
    x, weight = rand(1, 3, 28, 28), rand(12, 3, 14, 14)
    model = Model(lambda m, x: convolve(m, "c", x, "c.weight", None, stride=(14, 14)), [x], {"c.weight": weight})
    assert [(need.name, need.shape) for need in needs(model.graph)] == [("c.weight", (12, 3, 14, 14))]


def test_patches_of_frames_may_be_longer_in_time_than_in_space() -> None:
    x, weight = rand(1, 3, 4, 8, 8), rand(6, 3, 2, 4, 4) * np.float32(0.1)
    model = Model(lambda m, x: convolve(m, "c", x, "c.weight", None, stride=(2, 4, 4)), [x], {"c.weight": weight})
    assert close(model(x)[0], F.conv3d(tensor(x), tensor(weight), stride=(2, 4, 4)))
