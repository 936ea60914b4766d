"""Comparing live words with a reader's, for every element that a placement maps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from stitch.engines.placement.blocks import Block
from stitch.engines.placement.live import LiveTensors, Storage
from stitch.engines.placement.placement import Placement
from stitch.tensors.device import host_bits
from stitch.tensors.reader import WeightReader

PIECE_WORDS = 1 << 23
"""Words of a tensor that are read at a time."""


def read_back(
    placement: Placement,
    live: LiveTensors,
    reader: WeightReader,
    names: Iterable[str] | None = None,
) -> dict[str, int]:
    """Name -> number of live words that are not the reader's; names without any are left out."""
    wrong: dict[str, int] = {}
    for name in placement if names is None else names:
        for block in placement[name]:
            count = block_differences(block, name, live[block.key], reader)
            if count:
                wrong[name] = wrong.get(name, 0) + count
    return wrong


def block_differences(block: Block, name: str, storage: Storage, reader: WeightReader) -> int:
    """Number of live words of one block that are not the reader's."""
    count = 0
    for piece in block.pieces(PIECE_WORDS):
        words = reader.read(name, piece.source, piece.source_stop)
        if not words.flags.writeable:
            words = np.array(words)
        held = live_words(piece, storage)
        wanted = source_view(piece, host_bits(words), piece.source).to(held.device)
        if block.widen:
            wanted = widened(wanted)
        if not torch.equal(held, wanted):
            count += int((held != wanted).sum())
    return count


def live_words(block: Block, storage: Storage) -> torch.Tensor:
    """A view of the block's live words, in the shape of its dimensions."""
    return storage.words.as_strided(
        [n for n, _, _ in block.dims], [b for _, _, b in block.dims], block.live
    )


def source_view(block: Block, words: torch.Tensor, start: int) -> torch.Tensor:
    """The block's elements among a tensor's flat words, of which `words` begin at `start`."""
    return words.as_strided(
        [n for n, _, _ in block.dims], [a for _, a, _ in block.dims], block.source - start
    )


def widened(words: torch.Tensor) -> torch.Tensor:
    """F32 words of BF16 words."""
    return words.to(torch.int32) << 16


def narrowed(words: torch.Tensor) -> torch.Tensor:
    """BF16 words of F32 words; those that hold more than BF16 become the wrong ones.

    So no digest or comparison can pass: a word with low bits gets them mixed into the result.
    """
    return ((words >> 16) ^ (words & 0xFFFF)).to(torch.int16)
