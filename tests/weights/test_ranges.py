"""From tiles to byte ranges: the runs copy what the tiles say, and the bytes asked for are known beforehand."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expressions import FLOATS, Pool, twins, write_pool
from waybill.checkpoint import TensorHeader
from waybill.weights import LazyTensor, Tile, concat, stack, stored
from waybill.weights.ranges import SHORTEST_RUN, bytes_read, layout, read_through, strides


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return write_pool(tmp_path_factory.mktemp("pool"))


def whole(*shape: int, dtype: str = "F32") -> LazyTensor:
    return stored(TensorHeader("t", dtype, shape, "f", 0, math.prod(shape) * FLOATS[dtype].itemsize))


def only(value: LazyTensor) -> Tile:
    (tile,) = value.tiles
    return tile


@given(st.lists(st.integers(0, 5), max_size=4))
def test_strides_are_numpys(shape: list[int]) -> None:
    if 0 not in shape:
        assert strides(tuple(shape)) == tuple(s // 8 for s in np.empty(shape, np.float64).strides)


@settings(max_examples=300)
@given(st.data())
def test_copying_every_run_makes_the_tensor(pool: Pool, data: st.DataObject) -> None:
    twin = data.draw(twins(pool.leaves()))
    out = np.full(twin.ids.size, -1)
    for tile in twin.lazy.tiles:
        source = pool.ids_of(tile.source).reshape(-1)
        loops = layout(tile, twin.lazy.shape)
        length, _ = loops.run
        for start, at in loops.runs():
            assert (out[at : at + length] == -1).all(), "a place is filled twice"
            out[at : at + length] = source[start : start + length]
    np.testing.assert_array_equal(out.reshape(twin.ids.shape), twin.ids)


@settings(max_examples=200)
@given(st.data())
def test_runs_go_forward_through_the_file(pool: Pool, data: st.DataObject) -> None:
    twin = data.draw(twins(pool.leaves()))
    for tile in twin.lazy.tiles:
        loops = layout(tile, twin.lazy.shape)
        starts = [source for source, _ in loops.runs()]
        assert all(later - earlier >= loops.run[0] for earlier, later in pairwise(starts))


@settings(max_examples=300)
@given(st.data())
def test_reading_through_gaps_keeps_every_element_and_leaves_no_short_runs(pool: Pool, data: st.DataObject) -> None:
    for tile in data.draw(twins(pool.leaves())).lazy.tiles:
        wide = read_through(tile)
        for axis, size in enumerate(tile.source.shape):
            assert 0 <= wide.start[axis] <= tile.start[axis]
            assert tile.start[axis] + tile.extent[axis] <= wide.start[axis] + wide.shape[axis] <= size
        loops = layout(wide, wide.shape)
        length = loops.run[0] * FLOATS[tile.source.dtype].itemsize
        assert length >= SHORTEST_RUN or len(list(loops.runs())) == 1


@settings(max_examples=300)
@given(st.data())
def test_a_tile_without_short_runs_is_read_as_it_is(pool: Pool, data: st.DataObject) -> None:
    for tile in data.draw(twins(pool.leaves())).lazy.tiles:
        axes = range(len(tile.start))
        loops = layout(Tile(tile.source, (0,) * len(axes), tile.extent, tuple(axes), tile.start), tile.extent)
        if loops.run[0] * FLOATS[tile.source.dtype].itemsize >= SHORTEST_RUN:
            assert read_through(tile).shape == tile.extent


@settings(max_examples=200)
@given(st.data())
def test_bytes_read_are_at_least_the_bytes_needed(pool: Pool, data: st.DataObject) -> None:
    twin = data.draw(twins(pool.leaves()))
    needed = int(pool.byte_counts(twin.ids).sum())
    widened = any(read_through(tile).shape != tile.extent for tile in twin.lazy.tiles)
    assert bytes_read(twin.lazy) > needed if widened else bytes_read(twin.lazy) == needed


@pytest.mark.parametrize(("columns", "read"), [(255, 512), (256, 256), (257, 257)])
def test_columns_shorter_than_a_run_are_read_with_their_whole_rows(columns: int, read: int) -> None:
    assert SHORTEST_RUN == 1024
    assert bytes_read(whole(10, 512).narrow(1, 3, columns)) == 10 * read * 4


def test_a_single_short_run_is_read_alone() -> None:
    assert bytes_read(whole(10, 512).narrow(0, 4, 1).narrow(1, 3, 2)) == 2 * 4


def test_short_runs_of_an_inner_axis_widen_no_further_than_they_must() -> None:
    wide = read_through(only(whole(3, 100, 8).narrow(1, 20, 40).narrow(2, 1, 2)))
    assert (wide.start, wide.shape) == ((0, 20, 0), (3, 40, 8))


def test_the_rows_of_one_rank_are_one_run() -> None:
    tile = only(whole(8, 512).narrow(0, 2, 4))
    assert layout(tile, (4, 512)).run == (4 * 512, 0)


def test_the_columns_of_one_rank_are_a_run_a_row() -> None:
    loops = layout(only(whole(3, 512).narrow(1, 256, 256)), (3, 256))
    assert list(loops.runs()) == [(256, 0), (768, 256), (1280, 512)]


def test_padding_and_empty_tensors_read_nothing() -> None:
    assert bytes_read(whole(0, 4).pad(0, 5)) == 0
    assert bytes_read(stack([whole(0, 4)] * 3)) == 0


def test_a_tensor_used_twice_is_counted_twice() -> None:
    assert bytes_read(concat([whole(4, 3), whole(4, 3)])) == 2 * 4 * 3 * 4
