"""Elements that one rank keeps several times: which blocks count, and whether the others agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stitch.engines.placement.blocks import Block, UnmappableError
from stitch.engines.placement.live import LiveTensors
from stitch.engines.placement.readback import PIECE_WORDS, live_words, narrowed


def split_copies(
    blocks: Sequence[Block], num_words: int
) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """(primaries, copies): primaries are disjoint; every element of a copy is in one of them.

    Raises UnmappableError if blocks overlap in part.
    """
    ordered = sorted(blocks, key=lambda block: block.source)
    reach = 0
    for block in ordered:
        if block.source < reach:
            break
        reach = block.source_stop
    else:
        return tuple(ordered), ()
    taken = np.zeros(num_words, bool)
    primaries: list[Block] = []
    copies: list[Block] = []
    for block in sorted(blocks, key=lambda block: (-block.num, block.source)):
        view = block.elements.of(taken)
        if not view.any():
            view[...] = True
            primaries.append(block)
        elif view.all():
            copies.append(block)
        else:
            raise UnmappableError("its elements are kept in parts that overlap")
    return tuple(sorted(primaries, key=lambda block: block.source)), tuple(copies)


def copy_agrees(copy: Block, primaries: Sequence[Block], live: LiveTensors) -> bool:
    """Whether a copy's live words are those of the primaries."""
    for piece in copy.pieces(PIECE_WORDS):
        positions = piece.positions()
        mine = _words(piece, live)
        for block in primaries:
            if block.source >= piece.source_stop or piece.source >= block.source_stop:
                continue
            span, mask, offsets = block.locate(positions)
            held = live[block.key].words
            theirs = held[torch.from_numpy(offsets).to(held.device)]
            if block.widen:
                theirs = narrowed(theirs)
            picked = mine[span]
            if mask is not None:
                picked = picked[torch.from_numpy(mask).to(mine.device)]
            if not torch.equal(picked.to(theirs.device), theirs):
                return False
    return True


def _words(block: Block, live: LiveTensors) -> torch.Tensor:
    words = live_words(block, live[block.key]).reshape(-1)
    return narrowed(words) if block.widen else words
