"""Digest terms of blocks add up to the tensor's lanes, however its words are cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.codec import kernels
from stitch.engines.placement.blocks import Block
from stitch.engines.placement.digest import block_terms
from stitch.engines.placement.live import LiveTensors
from stitch.engines.placement.terms import EDGE, Terms, join, settle_edges


def live_of(array: np.ndarray) -> LiveTensors:
    model = torch.nn.Module()
    signed = array.view(f"i{array.itemsize}" if array.itemsize > 1 else "u1")
    model.register_buffer("k", torch.from_numpy(signed.copy()))
    return LiveTensors(model)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[Block]]:
    """(tensor words, live words, blocks that hold it all): cut by rows, columns or anyhow."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 23))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    tensor = rng.integers(0, 256, rows * columns * width, np.uint8).view(f"<u{width}")
    live = np.zeros(tensor.size, tensor.dtype)
    blocks, at = [], 0
    edges = sorted({0, columns, *draw(st.lists(st.integers(0, columns), max_size=3))})
    for lo, hi in itertools.pairwise(edges):
        flipped = draw(st.booleans())
        n = hi - lo
        strides = (1, rows) if flipped else (n, 1)
        dims = [(rows, columns, strides[0]), (n, 1, strides[1])]
        block = Block("k", lo, at, tuple(d for d in dims if d[0] > 1))
        live[block.offsets()] = tensor[block.positions()]
        blocks.append(block)
        at += rows * n
    return tensor, live, blocks


@settings(max_examples=150, deadline=None)
@given(cuts())
def test_terms_of_any_cut_add_up(case: tuple[np.ndarray, np.ndarray, list[Block]]) -> None:
    tensor, live, blocks = case
    storages = live_of(live)
    parts = [
        join(block_terms(b, storages["k"], tensor.itemsize, tensor.size), tensor.nbytes)
        for b in blocks
    ]
    parts = [Terms.from_json(part.to_json()) for part in parts]
    whole = join(parts, tensor.nbytes)
    assert (whole.lanes == kernels.sum_words(tensor)).all()
    assert not whole.edges.size


def test_missing_words_stay_as_parts_and_doubled_ones_are_refused() -> None:
    edges = np.zeros(2, EDGE)
    edges["index"], edges["mask"], edges["value"] = [3, 3], [0x0F, 0x70], [5, 6 << 32]
    left = settle_edges(edges, 80)
    assert left.edges["mask"].tolist() == [0x7F]
    assert (left.lanes == 0).all()
    edges["mask"] = [0x0F, 0x78]
    with pytest.raises(ValueError, match="overlap"):
        settle_edges(edges, 80)


def test_large_runs_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from stitch.engines.placement import digest

    monkeypatch.setattr(digest, "PIECE_WORDS", 64)
    words = np.random.default_rng(0).integers(0, 1 << 16, 1001, np.uint16)
    storages = live_of(np.concatenate((words[:3], words)))
    block = Block("k", 0, 3, ((1001, 1, 1),))
    pieces = list(block_terms(block, storages["k"], 2, 1001))
    assert len(pieces) > 10
    assert (join(pieces, 2002).lanes == kernels.sum_words(words)).all()


def test_words_beyond_bf16_change_the_digest() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    model = torch.nn.Module()
    model.register_buffer("k", values)
    storage = LiveTensors(model)["k"]
    block = Block("k", 0, 0, ((4, 1, 1),), widen=True)
    wanted = kernels.sum_words(values.bfloat16().view(torch.int16).numpy().view("<u2"))
    assert (join(block_terms(block, storage, 2, 4), 8).lanes == wanted).all()
    values[2] += 1e-6
    assert (join(block_terms(block, storage, 2, 4), 8).lanes != wanted).all()
