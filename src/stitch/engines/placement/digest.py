"""Digest terms of live weights, in the checkpoint's order. See docs/format.md, "Digest".

Read where they live, in pieces of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from stitch.codec import kernels
from stitch.codec.torch_digest import mixed_sum, to_lanes
from stitch.codec.words import WORD_DTYPES, Lanes
from stitch.engines.placement.blocks import Block
from stitch.engines.placement.live import Storage
from stitch.engines.placement.readback import live_words, narrowed
from stitch.engines.placement.terms import EDGE, Terms, settle_edges

PIECE_WORDS = 1 << 22
"""Words that are gathered at a time."""


def block_terms(block: Block, storage: Storage, word_bytes: int, num_words: int) -> Iterator[Terms]:
    """The terms of a block of a tensor of `num_words` words, in pieces of bounded size.

    The generator may be left alone between pieces: each is read when it is asked for.
    """
    per = 8 // word_bytes
    for piece in _aligned_pieces(block, per):
        if _whole_rows(piece, per):
            yield Terms(lanes=_row_lanes(piece, storage, per))
        else:
            yield _scattered(piece, storage, per, num_words)


def _aligned_pieces(block: Block, per: int) -> Iterator[Block]:
    """Pieces, with consecutive elements cut into whole words in the middle and odd ends."""
    for piece in block.pieces(PIECE_WORDS):
        if not piece.is_dense or not piece.dims:
            yield piece
            continue
        n, a, b = piece.dims[-1]
        if a != 1 or (len(piece.dims) > 1 and n % per):
            yield piece
            continue
        head = -piece.source % per
        if len(piece.dims) > 1 or (head == 0 and n % per == 0):
            yield piece
            continue
        head = min(head, n)
        middle = (n - head) // per * per
        for start, count in ((0, head), (head, middle), (head + middle, n - head - middle)):
            if count:
                dims = ((count, 1, b),) if count > 1 else ()
                yield Block(
                    piece.key, piece.source + start, piece.live + start * b, dims, piece.widen
                )


def _whole_rows(piece: Block, per: int) -> bool:
    """Whether the innermost elements are consecutive and fill 64-bit words."""
    if not piece.dims:
        return per == 1
    n, a, _ = piece.dims[-1]
    if a != 1:
        return per == 1
    outer = all(stride % per == 0 for _, stride, _ in piece.dims[:-1])
    return outer and n % per == 0 and piece.source % per == 0


def _row_lanes(piece: Block, storage: Storage, per: int) -> Lanes:
    words = live_words(piece, storage)
    if piece.widen:
        words = narrowed(words)
    if piece.is_dense and words.device.type == "cpu":
        flat = words.reshape(-1).numpy()
        unsigned = flat.view(WORD_DTYPES[flat.itemsize])
        return kernels.sum_words(unsigned, piece.source // per)
    rows = words.contiguous().view(-1).view(torch.int64)
    index = torch.full((1,), piece.source // per, dtype=torch.int64, device=words.device)
    for n, a, _ in piece.dims[:-1]:
        steps = torch.arange(n, device=words.device) * (a // per)
        index = (index[:, None] + steps).view(-1)
    if piece.dims and piece.dims[-1][1] == 1:
        inner = torch.arange(piece.dims[-1][0] // per, device=words.device)
        index = (index[:, None] + inner).view(-1)
    elif piece.dims:
        inner = torch.arange(piece.dims[-1][0], device=words.device) * piece.dims[-1][1]
        index = (index[:, None] + inner).view(-1)
    return to_lanes(mixed_sum(rows, index))


def _scattered(piece: Block, storage: Storage, per: int, num_words: int) -> Terms:
    """Any elements: bytes are gathered by the 64-bit word to which they belong."""
    words = live_words(piece, storage)
    if piece.widen:
        words = narrowed(words)
    flat = words.reshape(-1).cpu().numpy()
    values = flat.view(WORD_DTYPES[flat.itemsize]).astype(np.uint64)
    positions = piece.positions()
    width = 8 // per
    index, place = positions // per, (positions % per).astype(np.uint64)
    bits = values << (place * np.uint64(8 * width))
    masks = (np.uint64((1 << width) - 1) << (place * np.uint64(width))).astype(np.uint64)
    starts = np.flatnonzero(np.concatenate(([True], index[1:] != index[:-1])))
    edges = np.empty(starts.size, EDGE)
    edges["index"] = index[starts]
    edges["value"] = np.bitwise_or.reduceat(bits, starts)
    edges["mask"] = np.bitwise_or.reduceat(masks, starts)
    return settle_edges(edges, width * num_words)
