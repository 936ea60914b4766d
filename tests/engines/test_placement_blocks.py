"""Blocks: what a copy of views means, found again from positions or word by word."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.engines.placement.blocks import (
    Block,
    SourceSet,
    UnmappableError,
    blocks_of_copy,
    merge_dims,
)
from stitch.engines.placement.compress import MAX_BLOCKS, compress
from stitch.engines.placement.copies import split_copies
from stitch.engines.placement.placement import Placement


@st.composite
def copies(draw: st.DrawFn) -> tuple[int, Block]:
    """(elements of the tensor, a block): a slice of a tensor copied to a permuted, sliced place."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    source = np.arange(int(np.prod(shape))).reshape(shape)
    cut = tuple(slice(draw(st.integers(0, n - 1)), None, draw(st.integers(1, 2))) for n in shape)
    order = draw(st.permutations(range(len(shape))))
    view = source[cut].transpose(order)
    room = [n + draw(st.integers(0, 2)) for n in view.shape]
    live = np.arange(int(np.prod(room)) + 3).reshape(-1)[3:].reshape(room)
    place = live[tuple(slice(0, n) for n in view.shape)]
    strides = [tuple(step // 8 for step in array.strides) for array in (view, place)]
    start = int(view.reshape(-1)[0]), int(place.reshape(-1)[0])
    (block,) = blocks_of_copy("k", view.shape, (start[0], strides[0]), (start[1], strides[1]))
    assert dict(zip(view.reshape(-1).tolist(), place.reshape(-1).tolist(), strict=True)) == dict(
        zip(block.positions().tolist(), block.offsets().tolist(), strict=True)
    )
    return source.size, block


@given(copies(), st.randoms(use_true_random=False))
def test_positions_are_found_where_the_copy_puts_them(case: tuple[int, Block], rng: object) -> None:
    size, block = case
    where = dict(zip(block.positions().tolist(), block.offsets().tolist(), strict=True))
    chosen = np.array([p for p in range(size) if rng.random() < 0.5], np.int64)
    span, mask, offsets = block.locate(chosen)
    found = chosen[span] if mask is None else chosen[span][mask]
    assert found.tolist() == [p for p in chosen.tolist() if p in where]
    assert offsets.tolist() == [where[p] for p in found.tolist()]


@given(copies(), st.integers(1, 40))
def test_pieces_are_the_block_in_order(case: tuple[int, Block], extent: int) -> None:
    _, block = case
    pieces = list(block.pieces(extent))
    assert all(p.source_stop - p.source <= extent for p in pieces)
    assert np.concatenate([p.positions() for p in pieces]).tolist() == block.positions().tolist()
    assert np.concatenate([p.offsets() for p in pieces]).tolist() == block.offsets().tolist()


@given(copies())
def test_a_block_covers_its_positions_and_survives_json(case: tuple[int, Block]) -> None:
    size, block = case
    taken = np.zeros(size, bool)
    block.elements.of(taken)[...] = True
    assert np.flatnonzero(taken).tolist() == block.positions().tolist()
    assert (block.num, block.elements.num) == (taken.sum(), taken.sum())
    assert Block.from_json(json.loads(json.dumps(block.to_json()))) == block
    assert SourceSet.from_json(block.elements.to_json()) == block.elements
    ascending = np.all(np.diff(block.offsets()) > 0)
    assert block.is_ascending <= ascending


@settings(max_examples=60)
@given(copies())
def test_blocks_are_found_again_word_by_word(case: tuple[int, Block]) -> None:
    _, block = case
    order = np.argsort(block.offsets())
    live, source = block.offsets()[order], block.positions()[order]
    found = compress("k", live, source)
    pairs = {
        pair
        for part in found
        for pair in zip(part.positions().tolist(), part.offsets().tolist(), strict=True)
    }
    assert pairs == set(zip(source.tolist(), live.tolist(), strict=True))


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((96, 64), (0, 1)),
        ((64, 96), (1, 0)),
        ((6, 16, 64), (0, 2, 1)),
        ((2, 2, 2, 2), (3, 0, 2, 1)),
        ((4, 16, 32), (1, 0, 2)),
    ],
)
def test_regular_layouts_compress_to_one_block(
    shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    source = np.arange(int(np.prod(shape))).reshape(shape).transpose(order).reshape(-1)
    (block,) = compress("k", np.arange(source.size) + 7, source)
    assert block.num == source.size


def test_layouts_without_a_pattern_are_refused() -> None:
    rng = np.random.default_rng(0)
    size = 4 * MAX_BLOCKS
    with pytest.raises(UnmappableError, match="takes"):
        compress("k", np.arange(size), rng.permutation(size))


def test_one_element_in_several_places_makes_a_block_for_each() -> None:
    blocks = blocks_of_copy("k", (3, 4), (5, (0, 1)), (0, (4, 1)))
    assert [(b.source, b.live, b.dims) for b in blocks] == [
        (5, 0, ((4, 1, 1),)),
        (5, 4, ((4, 1, 1),)),
        (5, 8, ((4, 1, 1),)),
    ]
    with pytest.raises(UnmappableError, match="places"):
        blocks_of_copy("k", (1000, 4), (0, (0, 1)), (0, (4, 1)))


def test_overlapping_views_are_no_blocks() -> None:
    with pytest.raises(UnmappableError, match="overlap"):
        merge_dims([(4, 1, 3), (3, 1, 1)])


def test_copies_on_one_rank_are_told_from_what_counts() -> None:
    whole = Block("a", 0, 0, ((24, 1, 1),))
    part = Block("b", 6, 0, ((3, 4, 1),))
    assert split_copies([part, whole], 24) == ((whole,), (part,))
    halves = (Block("a", 0, 0, ((12, 2, 1),)), Block("a", 1, 12, ((12, 2, 1),)))
    assert split_copies(halves, 24) == (halves, ())
    with pytest.raises(UnmappableError, match="overlap"):
        split_copies([Block("a", 0, 0, ((8, 1, 1),)), Block("b", 4, 0, ((8, 1, 1),))], 24)


def test_names_that_share_words_are_tied_and_interleaved_ones_are_not() -> None:
    even, odd = Block("k", 0, 0, ((8, 1, 2),)), Block("k", 0, 1, ((8, 1, 2),))
    other = Block("k", 4, 9, ())
    placement = Placement({"a": [even], "b": [odd], "c": [other], "d": [Block("m", 0, 0, ())]})
    assert placement.ties() == [frozenset("bc")]
    assert Placement({"a": [even], "b": [odd]}).ties() == []
    back = Placement.from_json(json.loads(json.dumps(placement.to_json())))
    assert {name: back[name] for name in back} == {name: placement[name] for name in placement}


def test_many_blocks_are_found_by_bisection() -> None:
    blocks = [Block("k", 10 * i, 100 - i, ((3, 1, 1),)) for i in range(50)]
    placement = Placement({"a": blocks})
    positions = np.array([0, 11, 12, 13, 499, 498, 492], np.int64)
    positions.sort()
    found = {
        int(p): int(o)
        for _, span, _, offsets in placement.resolve("a", positions)
        for p, o in zip(positions[span], offsets, strict=True)
    }
    assert found == {0: 100, 11: 100, 12: 101, 492: 53}
