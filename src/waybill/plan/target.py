"""What a sink for weights declares: what it wants merged, how it wants weights, and what it cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from waybill.config.composite import Config
from waybill.errors import WaybillError
from waybill.plan.parameter import Merges, ParameterSpec
from waybill.weights import LazyTensor, Storage


def _as_it_is(_: ParameterSpec, weight: Storage) -> Mapping[str, LazyTensor]:
    return weight.parts


class Target(NamedTuple):
    """A sink for weights: its name, what it wants as one matrix, and how it wants parameters that a family declares.

    `adjust` may change how packed parameters are cut into blocks. `arrange` is given each finished weight, and says
    which tensors it is delivered as, by role.
    """

    name: str
    merges: Merges = Merges()
    adjust: Callable[[Sequence[ParameterSpec]], Sequence[ParameterSpec]] = lambda specs: specs
    arrange: Callable[[ParameterSpec, Storage], Mapping[str, LazyTensor]] = _as_it_is
    refusals: Callable[[Config, Sequence[ParameterSpec], str], Iterable[WaybillError]] = lambda *_: ()
    """What the target cannot run of these parameters in this dtype."""
    casts_scales: bool = False
    """Whether scales are wanted in the dtype of the model, which must then hold them exactly."""
    holds_result: bool = True
    """Whether everything delivered stays in memory."""
