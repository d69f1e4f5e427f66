"""Weights into the engine: plan, stream straight into torch tensors, bind."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from waybill.api import plan
from waybill.checkpoint import Checkpoint, RangeReader, read_checkpoint
from waybill.checkpoint.files import Progress
from waybill.config import ModelConfig
from waybill.engine.distributed import agreeing, all_agree, broadcast, get_tp_info
from waybill.engine.dtypes import TORCH_DTYPES
from waybill.engine.layers.rotary import set_rope_device
from waybill.engine.models.decoder import CausalLM
from waybill.engine.models.register import create_model
from waybill.errors import DeviceUnavailable, FileChanged
from waybill.families.decoder import HEAD
from waybill.plan import Binding, Plan
from waybill.plan.collection import uncollected
from waybill.plan.stream import IN_FLIGHT, equals, stream
from waybill.weights.dtypes import Array

"""Told the bytes that just reached their place."""


@contextmanager
def torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default of tensors created inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@functools.lru_cache(maxsize=16)
def _config_of(path: str, _mtime_ns: int) -> dict[str, Any]:
    return dict(read_checkpoint(path).config)


def cached_load_hf_config(path: str | Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder; read again only when the file changes."""
    file = Path(path) / "config.json"
    return _config_of(str(path), file.stat().st_mtime_ns if file.exists() else 0)


def download_hf_weight(model: str) -> Path:
    """The folder of a checkpoint, or a GGUF file: a local one as it is, a Hugging Face id through the hub's cache."""
    checkpoint = read_checkpoint(model)
    return checkpoint.fetched(checkpoint.files).location


def load_weight(path: str | Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter of this rank, merged and sharded, as soon as its last piece has been read.

    Host peak: what the caller keeps, plus what is read ahead (256 MiB, or one parameter).

    Raises:
        Refused: the plan does not add up; nothing was read.
    """
    bill = _plan(path, None)
    bill = bill.fetched()
    with RangeReader(bill.checkpoint) as reader:
        yield from _tensors(bill.bindings, reader, device)


@uncollected()
def load_model(
    path: Checkpoint | str | Path,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    check_finite: bool = False,
    bill: Plan | None = None,
    progress: Progress = lambda _: None,
) -> CausalLM:
    """Load this rank's share of a checkpoint; see `waybill.load`. `bill` saves planning twice."""
    with agreeing():
        place = _device(device)
        bill = bill or _plan(path, dtype)
        config = bill.require_clean()
    if not isinstance(config, ModelConfig):
        raise TypeError(f"a clean plan for the engine of a {config.model_type} model")
    set_rope_device(place)
    with torch.device("meta"), torch_dtype(TORCH_DTYPES[bill.dtype]):
        model = create_model(config, bill.packings)
    bill = fetch(bill)
    with RangeReader(bill.checkpoint) as reader:
        own = tuple(binding for binding in bill.bindings if binding.tied_to is None)
        with agreeing():
            # All results are kept, so reading ahead without a bound costs nothing.
            ahead = bill.result_bytes
            made = _tensors(own, reader, place, in_flight=ahead, check_finite=check_finite, progress=progress)
            state = dict(made)
        model.load_state_dict(state)
        heads = tuple(binding for binding in bill.bindings if binding.tied_to is not None)
        if heads and not _equals_table(heads, state, reader):
            _honour(model, heads, reader, place, check_finite)
        state.clear()  # the model's layers may now give up what they rearrange
        model.prepare()
    return model


def fetch(bill: Plan, bring: Callable[[Plan], Plan] = Plan.fetched) -> Plan:
    """The plan over files on this disk, brought from a hub on all ranks or on none; of one commit, or not at all.

    Raises:
        HubError, CannotWrite: they cannot be brought.
        FileChanged: the first rank has them from elsewhere.
        OtherRankFailed: another rank cannot bring them.
    """
    remote, place = bill.checkpoint.remote is not None, bill.checkpoint.place
    with agreeing():
        own = zlib.crc32(place.encode()) if remote else 0
        if int(broadcast(torch.tensor([own]))) != own:
            raise FileChanged(
                "the checkpoint changed on the hub while the ranks asked for it", where=place,
                expected="one commit on all ranks", found="another than the first rank's",
                fix="run again, or give the commit after an @",
            )  # fmt: skip
        return bring(bill) if remote else bill


def _plan(path: Checkpoint | str | Path, dtype: str | None) -> Plan:
    tp = get_tp_info()
    bill = plan(path, tp=tp.size, rank=tp.rank, dtype=dtype)
    bill.require_clean()
    return bill


def _tensors(
    bindings: tuple[Binding, ...],
    reader: RangeReader,
    device: torch.device,
    *,
    in_flight: int = IN_FLIGHT,
    check_finite: bool = False,
    progress: Progress = lambda _: None,
) -> Iterator[tuple[str, torch.Tensor]]:
    made: dict[str, torch.Tensor] = {}

    def allocate(binding: Binding) -> Array:
        tensor = torch.empty(binding.shape, dtype=TORCH_DTYPES[binding.dtype])
        made[binding.target] = tensor
        return _bytes_of(tensor)

    for binding, _ in stream(
        bindings, reader, allocate, in_flight=in_flight, check_finite=check_finite, progress=progress
    ):
        yield binding.target, made.pop(binding.target).to(device)


def _bytes_of(tensor: torch.Tensor) -> Array:
    """The memory of a contiguous host tensor."""
    array: Array = tensor.view(-1).view(torch.uint8).numpy()
    return array


def _rows_of(tensor: torch.Tensor) -> Callable[[int, int], Array]:
    """The bytes of a host tensor's rows."""
    return lambda start, stop: _bytes_of(tensor[start:stop])


def _equals_table(heads: tuple[Binding, ...], state: Mapping[str, torch.Tensor], reader: RangeReader) -> bool:
    """Whether a head that is stored though the config ties it has the embedding's bytes, on every rank."""
    with agreeing():
        same = all(equals(head, reader, _rows_of(state[head.tied_to].cpu())) for head in heads if head.tied_to)
    return all_agree(same)


def _honour(
    model: CausalLM, heads: tuple[Binding, ...], reader: RangeReader, device: torch.device, check_finite: bool
) -> None:
    """The file's head is not the embedding: it gets a weight of its own."""
    model.lm_head.untie()
    stem = HEAD.removesuffix("weight")
    with agreeing():
        tensors = dict(_tensors(heads, reader, device, check_finite=check_finite))
    model.lm_head.load_state_dict({name.removeprefix(stem): tensor for name, tensor in tensors.items()})


def _device(name: str) -> torch.device:
    """cpu, cuda (this rank's GPU) or cuda:N."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = {"cpu": "cpu"} | {f"cuda:{n}": f"cuda:{n}" for n in range(count)}
    if count:
        known["cuda"] = f"cuda:{get_tp_info().rank % count}"
    if name not in known:
        raise DeviceUnavailable(
            "the device is not on this machine",
            where="--device",
            expected=" | ".join(known),
            found=name,
            fix="use one that is; for a GPU, a CUDA build of torch is needed too",
        )
    return torch.device(known[name])
