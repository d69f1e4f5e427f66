"""How layers hold, gather and load their weights, by attribute path and without `nn.Module`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from waybill.config import ModelConfig
from waybill.engine.distributed import TPInfo
from waybill.engine.dtypes import TORCH_DTYPES
from waybill.errors import DtypeMismatch, MissingWeight, Refused, ShapeMismatch, UnclaimedWeight, WaybillError
from waybill.families.decoder import decoder_parameters
from waybill.plan.parameter import Packing


class Parameters:
    """Makes this rank's empty tensors from the engine's declarations, in the current default dtype and device."""

    def __init__(self, config: ModelConfig, tp: TPInfo, packings: Mapping[str, Packing]) -> None:
        self.config = config
        self.tp = tp
        self._specs = {spec.name: spec for spec in decoder_parameters(config, packings)}
        self._tensors = {
            name: form for spec in self._specs.values() for name, form in spec.tensors(tp.rank, tp.size).items()
        }

    def has(self, name: str) -> bool:
        """Whether this model declares the parameter."""
        return name in self._specs

    def packing(self, name: str) -> Packing | None:
        """How this rank's cut of a parameter is packed, or None: float."""
        return self._specs[name].local_packing(self.tp.size)

    def in_features(self, name: str) -> int:
        """K of this rank's cut of a matrix, before its last group is filled up."""
        return self._specs[name].local_shape(self.tp.rank, self.tp.size)[-1]

    def empty(self, name: str) -> torch.Tensor:
        """An uninitialised tensor of the declared shape."""
        shape, dtype = self._tensors[name]
        return torch.empty(shape) if dtype is None else torch.empty(shape, dtype=TORCH_DTYPES[dtype])

    def optional(self, name: str) -> torch.Tensor | None:
        """The same, or None when this model does not declare the parameter (a bias, say)."""
        return self.empty(name) if name in self._tensors else None


class BaseOP:
    """A layer. Tensor attributes are its weights, BaseOP attributes its children; names starting with _ are neither.

    A child called `matrix` lends its weights to its owner: they appear under the owner's path.
    """

    def state_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Every weight below this layer, by dotted attribute path."""
        state: dict[str, torch.Tensor] = {}
        for _, name, value in self._members():
            if isinstance(value, torch.Tensor):
                state[prefix + name] = value
            else:
                state |= value.state_dict(f"{prefix}{name}.")
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight by the one of its name, after checking all of them.

        Raises:
            Refused: with every missing, misshapen, mistyped or left-over tensor; no weight was replaced.
        """
        rest = dict(state)
        problems: list[WaybillError] = []
        steps = list(self._take(rest, "", problems))
        problems += [_left_over(name, tensor) for name, tensor in rest.items()]
        if problems:
            raise Refused(problems)
        for owner, name, tensor in steps:
            setattr(owner, name, tensor)

    def descendants(self) -> Iterator[BaseOP]:
        """Every layer below this one."""
        for name, value in vars(self).items():
            if not name.startswith("_") and isinstance(value, BaseOP):
                yield value
                yield from value.descendants()

    def _members(self) -> Iterator[tuple[BaseOP, str, Any]]:
        for name, value in vars(self).items():
            if name == "matrix":
                yield from value._members()
            elif not name.startswith("_") and isinstance(value, (torch.Tensor, BaseOP)):
                yield self, name, value

    def _take(
        self, rest: dict[str, torch.Tensor], prefix: str, problems: list[WaybillError]
    ) -> Iterator[tuple[BaseOP, str, torch.Tensor]]:
        """Claim this layer's tensors out of `rest`; yields what to set once everything is known to fit."""
        for owner, name, value in self._members():
            if isinstance(value, BaseOP):
                yield from value._take(rest, f"{prefix}{name}.", problems)
                continue
            tensor = rest.pop(prefix + name, None)
            if problem := _misfit(prefix + name, value, tensor):
                problems.append(problem)
            elif tensor is not None:
                yield owner, name, tensor


Op = TypeVar("Op", bound=BaseOP)


class OPList(BaseOP, Generic[Op]):
    """Layers by number."""

    def __init__(self, ops: list[Op]) -> None:
        self.op_list = ops

    def descendants(self) -> Iterator[BaseOP]:
        """Every layer below this one."""
        for op in self.op_list:
            yield op
            yield from op.descendants()

    def _members(self) -> Iterator[tuple[BaseOP, str, Any]]:
        for number, op in enumerate(self.op_list):
            yield self, str(number), op


def _misfit(name: str, slot: torch.Tensor, tensor: torch.Tensor | None) -> WaybillError | None:
    if tensor is None:
        return MissingWeight(
            "a weight is missing from the state dict",
            where=name,
            expected=_form(slot),
            found="no such key",
            fix="pass every tensor that load_weight yields",
        )
    if tensor.shape != slot.shape:
        return ShapeMismatch(
            "a weight has another shape than the model",
            where=name,
            expected=_form(slot),
            found=_form(tensor),
            fix="load with the config and tensor-parallel size the model was created with",
        )
    if tensor.dtype != slot.dtype:
        return DtypeMismatch(
            "a weight has another dtype than the model",
            where=name,
            expected=_form(slot),
            found=_form(tensor),
            fix="create the model under torch_dtype(...) of the weights, or convert them",
        )
    return None


def _left_over(name: str, tensor: torch.Tensor) -> WaybillError:
    return UnclaimedWeight(
        "a tensor has no place in the model",
        where=name,
        expected="only names of the model's state dict",
        found=_form(tensor),
        fix="remove it, or create the model this state dict belongs to",
    )


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
