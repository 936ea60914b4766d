"""Digest terms of what one rank holds, read while serving goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

from stitch.engines.placement.blocks import Block
from stitch.engines.placement.copies import copy_agrees
from stitch.engines.placement.digest import block_terms
from stitch.engines.placement.live import LiveTensors
from stitch.engines.placement.terms import Terms, join
from stitch.types import Schema

Hold = Callable[[], AbstractContextManager[None]]
"""Makes a context in which nobody writes; it raises if somebody did before."""

Split = tuple[tuple[Block, ...], tuple[Block, ...]]
"""A tensor's blocks: those that count, and copies of their elements."""


def live_terms(
    names: Iterable[str], splits: Mapping[str, Split], live: LiveTensors, schema: Schema, hold: Hold
) -> tuple[dict[str, list[list[str]]], list[str]]:
    """(name -> terms of each block that counts, names whose copies on this rank differ).

    `hold` is entered for one piece at a time, some milliseconds.
    """
    terms: dict[str, list[list[str]]] = {}
    differing: list[str] = []
    for name in names:
        primaries, copies = splits[name]
        terms[name] = [_block(name, b, live, schema, hold).to_json() for b in primaries]
        with hold():
            if not all(copy_agrees(copy, primaries, live) for copy in copies):
                differing.append(name)
    return terms, differing


def _block(name: str, block: Block, live: LiveTensors, schema: Schema, hold: Hold) -> Terms:
    spec = schema[name]
    pieces = block_terms(block, live[block.key], spec.word_bytes, spec.num_words)
    found: list[Terms] = []
    while True:
        with hold():
            piece = next(pieces, None)
        if piece is None:
            return join(found, spec.num_bytes)
        found.append(piece)
