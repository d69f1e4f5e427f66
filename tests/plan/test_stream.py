"""Streaming: the bytes are numpy's, each is read once, memory stays bounded, and nothing is left running."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import waybill
from checkpoints import Array, Recipe, llama, qwen3_moe
from expressions import FLOATS, Pool, Twin, twins, write_pool
from waybill.checkpoint import Checkpoint, RangeReader, read_checkpoint
from waybill.errors import CastOverflow, FileChanged, NonFiniteWeight, WaybillError
from waybill.plan import Binding, Plan
from waybill.plan import stream as module
from waybill.plan.stream import equals, stream
from waybill.weights import LazyTensor, concat, stack, stored
from waybill.weights.ranges import bytes_read, read_through

KIB = 1 << 10


class WatchedReader(RangeReader):
    """A real reader that keeps a list of the ranges it was asked for, one entry a call."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.calls: list[list[tuple[int, int]]] = []

    def read_into(self, file: str, segments: list[tuple[int, memoryview]]) -> None:
        self.calls.append([(offset, len(view)) for offset, view in segments])
        super().read_into(file, segments)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [found for call in self.calls for found in call]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return write_pool(tmp_path_factory.mktemp("pool"))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4 * KIB)
    monkeypatch.setattr(module, "SEGMENTS", 3)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("waybill-")] == []


def planned(folder: Path, **options: Any) -> Plan:
    plan = waybill.plan(folder, **options)
    plan.require_clean()
    return plan


def binding(value: LazyTensor, dtype: str, target: str = "t") -> Binding:
    return Binding(target, value.shape, dtype, ("s",), (), bytes_read(value), value)


def dirty(of: Binding) -> Array:
    """Memory that was used before."""
    return np.full(of.nbytes, 0xAB, np.uint8)


def run(pool: Pool, value: LazyTensor, dtype: str) -> tuple[bytes, WatchedReader, int]:
    """The bytes delivered, the reader that read them, and the progress told."""
    told: list[int] = []
    with WatchedReader(pool.checkpoint) as reader:
        ((_, result),) = stream((binding(value, dtype),), reader, dirty, progress=told.append)
    return result.tobytes(), reader, sum(told)


@settings(max_examples=500)
@given(st.data(), st.sampled_from(["F32", "F16", "BF16"]), st.sampled_from([16, 4 * KIB, 8 << 20]))
def test_any_composition_in_any_dtype_delivers_numpys_bytes(
    pool: Pool, data: st.DataObject, dtype: str, chunk: int
) -> None:
    twin = data.draw(twins(pool.leaves()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        patch.setattr(module, "SEGMENTS", 3)
        delivered, reader, told = run(pool, twin.lazy, dtype)
    assert delivered == pool.values(twin.ids, dtype).tobytes()
    assert reader.bytes_read == sum(length for _, length in reader.ranges) == bytes_read(twin.lazy)
    assert told == len(delivered)


@settings(max_examples=200)
@given(st.data(), st.sampled_from(["F32", "BF16"]))
def test_without_gaps_to_read_through_each_needed_byte_is_read_once(
    pool: Pool, data: st.DataObject, dtype: str
) -> None:
    twin = data.draw(twins(pool.leaves()))
    _, reader, _ = run(pool, twin.lazy, dtype)
    counts = np.zeros(pool.checkpoint.shards[0].size, int)
    for offset, length in reader.ranges:
        counts[offset : offset + length] += 1
    needed = pool.byte_counts(twin.ids)
    if any(read_through(tile).shape != tile.extent for tile in twin.lazy.tiles):
        assert (counts >= needed).all()
    else:
        np.testing.assert_array_equal(counts, needed)


ARRANGEMENTS: dict[str, Callable[[LazyTensor], LazyTensor]] = {
    "whole": lambda t: t,
    "rows": lambda t: t.narrow(0, 2, 3),
    "a short column": lambda t: t.narrow(1, 5, 1),
    "long columns": lambda t: t.narrow(1, 1, 598),
    "a row": lambda t: t.select(0, 6),
    "transposed": lambda t: t.transpose(),
    "transposed columns": lambda t: t.transpose().narrow(0, 10, 3),
    "padded": lambda t: t.narrow(0, 0, 3).pad(0, 5).pad(1, 601),
    "joined by columns": lambda t: concat([t, t.narrow(1, 0, 7)], axis=1),
    "taken apart and stacked": lambda t: stack([t.select(0, row) for row in range(7)]),
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("source", "target"), list(product(FLOATS, ["F32", "F16", "BF16"])))
@pytest.mark.parametrize("kind", ARRANGEMENTS)
def test_a_matrix_in_every_arrangement_and_pair_of_dtypes(pool: Pool, source: str, target: str, kind: str) -> None:
    header = pool.checkpoint.tensors[f"{source}-7x600"]
    ids = Twin(stored(header), pool.ids_of(header)).ids
    by_numpy = {
        "whole": ids,
        "rows": ids[2:5],
        "a short column": ids[:, 5:6],
        "long columns": ids[:, 1:599],
        "a row": ids[6],
        "transposed": ids.T,
        "transposed columns": ids[:, 10:13].T,
        "padded": np.pad(ids[:3], [(0, 2), (0, 1)], constant_values=-1),
        "joined by columns": np.hstack([ids, ids[:, :7]]),
        "taken apart and stacked": ids,
    }
    delivered, _, _ = run(pool, ARRANGEMENTS[kind](stored(header)), target)
    assert delivered == pool.values(by_numpy[kind], target).tobytes()


@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("source", FLOATS)
def test_a_scalar_is_delivered(pool: Pool, source: str, target: str) -> None:
    header = pool.checkpoint.tensors[f"{source}-scalar"]
    assert run(pool, stored(header), target)[0] == pool.values(pool.ids_of(header), target).tobytes()


@pytest.mark.parametrize("target", ["F32", "BF16"])
@pytest.mark.parametrize("source", FLOATS)
def test_a_block_that_is_staged_has_a_chunk_at_most(
    pool: Pool, source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 16 * KIB)
    _, reader, _ = run(pool, stored(pool.checkpoint.tensors[f"{source}-7x600"]).transpose(), target)
    assert max(sum(length for _, length in call) for call in reader.calls) <= 16 * KIB


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("columns", "jobs"), [(600, [[4096], [4096], [4096], [4096], [416]]), (300, [[1200] * 3, [1200] * 3, [1200]])]
)
def test_a_job_holds_a_chunk_and_three_runs_at_most(pool: Pool, columns: int, jobs: list[list[int]]) -> None:
    _, reader, _ = run(pool, stored(pool.checkpoint.tensors["F32-7x600"]).narrow(1, 0, columns), "F32")
    assert sorted([[length for _, length in call] for call in reader.calls], reverse=True) == jobs


def test_many_short_runs_are_not_read_one_by_one(pool: Pool) -> None:
    header = pool.checkpoint.tensors["F32-2x130x3"]
    side_by_side = concat([stored(header).select(0, 0), stored(header).select(0, 1)], axis=1)
    _, reader, _ = run(pool, side_by_side, "F32")
    assert len(reader.ranges) <= 4


def test_a_bank_that_is_taken_apart_and_stacked_again_is_read_as_one_run(tmp_path: Path) -> None:
    plan = planned(qwen3_moe(banks=True).write(tmp_path))
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
        (bank,) = [b for b in plan.bindings if b.target == name]
        with WatchedReader(plan.checkpoint) as reader:
            list(stream((bank,), reader, dirty))
        header = plan.checkpoint.tensors[name]
        assert reader.calls == [[(header.offset, header.nbytes)]]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = llama(num_hidden_layers=6).write(tmp_path_factory.mktemp("llama"), shard_of=lambda name: len(name) % 3)
    return planned(folder)


@pytest.mark.parametrize("in_flight", [0, 5_000, 40_000, 1 << 30])
def test_bindings_come_in_plan_order_and_no_more_than_in_flight_is_ahead(plan: Plan, in_flight: int) -> None:
    ahead = 0

    def allocate(of: Binding) -> Array:
        nonlocal ahead
        ahead += of.nbytes
        assert ahead <= in_flight or ahead == of.nbytes
        return dirty(of)

    order = []
    with RangeReader(plan.checkpoint) as reader:
        for done, _ in stream(plan.bindings, reader, allocate, in_flight=in_flight):
            ahead -= done.nbytes
            order.append(done)
    assert tuple(order) == plan.bindings
    assert reader.bytes_read == plan.bytes_read == plan.checkpoint.nbytes


@pytest.mark.parametrize("tp", [1, 4])
def test_progress_adds_up_to_the_bytes_of_the_result(tmp_path: Path, tp: int) -> None:
    plan = planned(llama(vocab_size=127).write(tmp_path), tp=tp, rank=tp - 1)
    told: list[int] = []
    with RangeReader(plan.checkpoint) as reader:
        list(stream(plan.bindings, reader, dirty, progress=told.append))
    assert sum(told) == plan.result_bytes


@pytest.mark.parametrize("taken", [0, 1, 5])
@pytest.mark.parametrize("in_flight", [0, 1 << 30])
def test_a_stream_that_is_abandoned_ends_its_threads(plan: Plan, taken: int, in_flight: int) -> None:
    with RangeReader(plan.checkpoint) as reader:
        loads = stream(plan.bindings, reader, dirty, in_flight=in_flight)
        for _ in range(taken):
            next(loads)
        loads.close()
        assert not any(thread.name.startswith("waybill-") for thread in threading.enumerate())
        assert list(loads) == []


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    plan = planned(llama(num_hidden_layers=4).write(tmp_path))
    with RangeReader(plan.checkpoint) as reader:
        loads = stream(plan.bindings, reader, dirty, in_flight=0)
        next(loads)
        os.truncate(tmp_path / "model.safetensors", plan.checkpoint.shards[0].size // 2)
        with pytest.raises(FileChanged, match="file-changed") as refused:
            list(loads)
    assert "the file ends at byte" in refused.value.found


def test_a_changed_file_is_refused_however_often_it_is_tried(tmp_path: Path) -> None:
    plan = planned(llama().write(tmp_path))
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    with RangeReader(plan.checkpoint) as reader:
        for _ in range(2):
            with pytest.raises(FileChanged, match="another file, size or modification time"):
                list(stream(plan.bindings, reader, dirty))


def test_a_value_too_large_for_the_dtype_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    recipe = llama(np.float32)
    recipe.tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = 70_000
    plan = planned(recipe.write(tmp_path), dtype="float16")
    with RangeReader(plan.checkpoint) as reader, pytest.raises(CastOverflow, match="cast-overflow") as refused:
        list(stream(plan.bindings, reader, dirty))
    assert refused.value.where == "model.layers.1.mlp.up_proj.weight (model.safetensors)"


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_value_that_is_not_finite_is_an_error_when_asked_for(tmp_path: Path, bad: float, dtype: str) -> None:
    recipe = llama()
    recipe.tensors["model.layers.0.self_attn.k_proj.weight"][3, 1] = bad
    plan = planned(recipe.write(tmp_path), dtype=dtype)
    with RangeReader(plan.checkpoint) as reader:
        assert len(list(stream(plan.bindings, reader, dirty))) == len(plan.bindings)
        with pytest.raises(NonFiniteWeight, match="non-finite-weight") as refused:
            list(stream(plan.bindings, reader, dirty, check_finite=True))
    assert refused.value.where.startswith("model.layers.0.self_attn.qkv_proj.weight, made from ")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_file_stays_open_after_a_load(plan: Plan) -> None:
    before = open_files()
    with RangeReader(plan.checkpoint) as reader:
        list(stream(plan.bindings, reader, dirty))
        assert open_files() == before + len(plan.checkpoint.shards)
    assert open_files() == before


def test_an_error_in_the_callers_code_ends_the_threads_too(plan: Plan) -> None:
    def allocate(of: Binding) -> Array:
        if of is plan.bindings[4]:
            raise MemoryError
        return dirty(of)

    with RangeReader(plan.checkpoint) as reader, pytest.raises(MemoryError):
        list(stream(plan.bindings, reader, allocate))


TABLE = np.arange(80 * 256, dtype=np.float32).reshape(80, 256)  # 80 KiB: 20 chunks of 4 rows
WORKERS = min(module.THREADS, os.cpu_count() or 1)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    checkpoint = read_checkpoint(Recipe({}, {"t": TABLE}).write(tmp_path_factory.mktemp("table")))
    return Pool(checkpoint, {"t": TABLE}, {"t": 0})


def rows_of(reference: Array) -> Callable[[int, int], Array]:
    return lambda start, stop: reference[start:stop].reshape(-1).view(np.uint8)


def compare(table: Pool, value: LazyTensor, dtype: str, reference: Array) -> tuple[bool, int]:
    with RangeReader(table.checkpoint) as reader:
        return equals(binding(value, dtype), reader, rows_of(reference)), reader.bytes_read


@settings(max_examples=60)
@given(at=st.integers(0, TABLE.nbytes - 1), bit=st.integers(0, 7))
def test_one_wrong_bit_anywhere_is_found_and_little_is_read_after_it(table: Pool, at: int, bit: int) -> None:
    reference = TABLE.copy()
    reference.reshape(-1).view(np.uint8)[at] ^= 1 << bit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", 4 * KIB)
        same, read = compare(table, stored(table.checkpoint.tensors["t"]), "F32", reference)
    assert not same
    assert read <= (at // (4 * KIB) + WORKERS) * 4 * KIB


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("rows", [80, 82])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_equal_bytes_are_equal_cast_and_padded_too(table: Pool, dtype: str, rows: int) -> None:
    value = stored(table.checkpoint.tensors["t"]).pad(0, rows)
    reference = np.pad(TABLE, [(0, rows - 80), (0, 0)]).astype(FLOATS[dtype])
    assert compare(table, value, dtype, reference) == (True, TABLE.nbytes)
    reference[-1, -1] = 1
    assert not compare(table, value, dtype, reference)[0]


def test_another_number_of_rows_is_not_equal(table: Pool) -> None:
    assert not compare(table, stored(table.checkpoint.tensors["t"]), "F32", TABLE[:40])[0]


def test_a_file_that_changed_is_an_error_and_not_a_difference(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(Recipe({}, {"t": TABLE}).write(tmp_path))
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    with RangeReader(checkpoint) as reader, pytest.raises(WaybillError, match="file-changed"):
        equals(binding(stored(checkpoint.tensors["t"]), "F32"), reader, rows_of(TABLE))
