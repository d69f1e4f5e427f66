"""Lazy tensors: whatever is composed, the tiles say where each stored element lands."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expressions import Array, Pool, Twin, twins, write_pool
from waybill.checkpoint import TensorHeader
from waybill.weights import LazyTensor, Tile, concat, stack, stored


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return write_pool(tmp_path_factory.mktemp("pool"))


def header(*shape: int, dtype: str = "F32") -> TensorHeader:
    return TensorHeader("t", dtype, shape, "f.safetensors", 100, int(np.prod(shape)) * 4)


def lay_out(value: LazyTensor, pool: Pool) -> Array:
    """The element numbers that the tiles say, by the words of `Tile`'s docstring; each place may be filled once."""
    result = np.full(value.shape, -1)
    for tile in value.tiles:
        box = pool.ids_of(tile.source)[tuple(slice(s, s + n) for s, n in zip(tile.start, tile.extent, strict=True))]
        followed = [axis for axis in tile.axes if axis is not None]
        fixed = [axis for axis in range(box.ndim) if axis not in followed]
        place = tuple(slice(o, o + n) for o, n in zip(tile.offset, tile.shape, strict=True))
        assert result[place].shape == tile.shape, "a tile leaves the result"
        assert (result[place] == -1).all(), "two tiles overlap"
        result[place] = box.transpose(followed + fixed).reshape(tile.shape)
    return result


@settings(max_examples=400)
@given(st.data())
def test_any_composition_places_every_element_where_numpy_does(pool: Pool, data: st.DataObject) -> None:
    twin = data.draw(twins(pool.leaves()))
    assert twin.lazy.shape == twin.ids.shape
    np.testing.assert_array_equal(lay_out(twin.lazy, pool), twin.ids)


@settings(max_examples=100)
@given(st.data())
def test_no_tile_is_empty_and_every_tile_lies_inside_its_tensor(pool: Pool, data: st.DataObject) -> None:
    for tile in data.draw(twins(pool.leaves())).lazy.tiles:
        ends = [start + length for start, length in zip(tile.start, tile.extent, strict=True)]
        assert min(tile.extent, default=1) > 0
        assert all(end <= size for end, size in zip(ends, tile.source.shape, strict=True))


@settings(max_examples=100)
@given(st.data())
def test_stacking_what_select_took_apart_gives_the_same_elements(pool: Pool, data: st.DataObject) -> None:
    leaves = [leaf for leaf in pool.leaves() if leaf.ids.ndim and leaf.ids.shape[0]]
    twin = data.draw(twins(leaves).filter(lambda t: t.ids.ndim > 0 and t.ids.shape[0] > 0))
    again = stack([twin.lazy.select(0, index) for index in range(twin.ids.shape[0])])
    assert again.shape == twin.lazy.shape
    np.testing.assert_array_equal(lay_out(again, pool), twin.ids)


@settings(max_examples=100)
@given(st.data())
def test_concatenating_what_narrow_cut_apart_gives_the_same_elements(pool: Pool, data: st.DataObject) -> None:
    twin = data.draw(twins(pool.leaves()).filter(lambda t: t.ids.ndim > 0))
    axis = data.draw(st.integers(0, twin.ids.ndim - 1))
    cut = data.draw(st.integers(0, twin.ids.shape[axis]))
    parts = [twin.lazy.narrow(axis, 0, cut), twin.lazy.narrow(axis, cut, twin.ids.shape[axis] - cut)]
    np.testing.assert_array_equal(lay_out(concat(parts, axis), pool), twin.ids)


def test_a_narrowed_tensor_refers_only_to_the_rows_it_keeps() -> None:
    kept = concat([stored(header(4, 3)), stored(header(4, 3))]).narrow(0, 5, 2)
    assert [(tile.start, tile.extent) for tile in kept.tiles] == [((1, 0), (2, 3))]


def test_narrowing_to_nothing_keeps_no_tile() -> None:
    nothing = stored(header(4, 3)).narrow(1, 2, 0)
    assert (nothing.shape, nothing.tiles, nothing.nbytes) == ((4, 0), (), 0)


def test_an_empty_tensor_has_no_tile() -> None:
    assert stored(header(3, 0)).tiles == ()


def test_a_scalar_is_one_tile_without_axes() -> None:
    assert stored(header()).tiles == (Tile(header(), (), (), (), ()),)


def test_narrowing_to_the_whole_axis_changes_nothing() -> None:
    whole = stored(header(4, 3))
    assert whole.narrow(0, 0, 4) is whole
    assert concat([whole]) is whole


def test_transposing_twice_changes_nothing() -> None:
    matrix = stored(header(4, 3)).narrow(1, 1, 2)
    assert matrix.transpose().transpose() == matrix
    assert not matrix.transpose().tiles[0].in_order


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 5), (4, 1), (2, -1), (5, 0)])
def test_narrowing_outside_the_axis_is_refused(start: int, length: int) -> None:
    with pytest.raises(ValueError, match="narrow"):
        stored(header(4, 3)).narrow(0, start, length)


def test_padding_to_fewer_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="pad"):
        stored(header(4, 3)).pad(0, 3)


@pytest.mark.parametrize(("dtype", "bits"), [("F16", 16), ("BF16", 16), ("F32", 32), ("F64", 64), ("F4", 4)])
def test_nbytes_counts_padding_too(dtype: str, bits: int) -> None:
    value = stored(TensorHeader("t", dtype, (4, 6), "f", 0, 24 * bits // 8)).pad(0, 5)
    assert value.nbytes == 5 * 6 * bits // 8


def test_a_bank_taken_apart_and_stacked_again_has_boxes_that_touch(pool: Pool) -> None:
    bank = next(leaf for leaf in pool.leaves() if leaf.ids.shape == (3, 4, 5))
    halves = [[bank.lazy.select(0, e).narrow(0, m * 2, 2) for m in range(2)] for e in range(3)]
    again = Twin(stack([concat(pair) for pair in halves]), bank.ids)
    np.testing.assert_array_equal(lay_out(again.lazy, pool), bank.ids)
    assert [tile.start for tile in again.lazy.tiles] == [(e, 2 * m, 0) for e in range(3) for m in range(2)]
