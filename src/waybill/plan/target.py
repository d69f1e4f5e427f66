"""What a sink for weights declares: its parameters, what it merges, how it wants them, and what it cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from waybill.config import ModelConfig
from waybill.errors import WaybillError
from waybill.plan.parameter import Packing, ParameterSpec
from waybill.rules import RuleTable
from waybill.weights import LazyTensor, Storage


def _as_it_is(_: ParameterSpec, weight: Storage) -> Mapping[str, LazyTensor]:
    return weight.parts


class Target(NamedTuple):
    """A sink for weights: its name, the rules from module names to its own, and the parameters it needs.

    `parameters` is given the packings found on disk, by module weight name, and decides what is merged. `arrange` is
    given each finished weight, and says which tensors it is delivered as, by role.
    """

    name: str
    rules: RuleTable
    parameters: Callable[[ModelConfig, Mapping[str, Packing]], Sequence[ParameterSpec]]
    arrange: Callable[[ParameterSpec, Storage], Mapping[str, LazyTensor]] = _as_it_is
    refusals: Callable[[ModelConfig, Sequence[ParameterSpec], str], Iterable[WaybillError]] = lambda *_: ()
    """What the target cannot run of these parameters in this dtype."""
    casts_scales: bool = False
    """Whether scales are wanted in the dtype of the model, which must then hold them exactly."""
    holds_result: bool = True
    """Whether everything delivered stays in memory."""
