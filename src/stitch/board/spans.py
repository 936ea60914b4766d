"""Where merged patches lie: spans whose length is a power of two and divides their start.

Because the places are fixed, a reader finds the merged patches between two versions by asking for
a few keys, and two writers agree on what to write. Any two spans are either apart or nested, so
whoever goes from version to version takes the longest span each time and misses no better way.
See docs/protocol.md, "Merged patches".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

MIN_SPAN = 4
"""Versions that the shortest merged patch leads over."""

Span: TypeAlias = tuple[int, int]
"""(from version, to version)."""


def is_span(start: int, stop: int) -> bool:
    """Whether there may be a merged patch from version `start` to version `stop`."""
    length = stop - start
    return length >= MIN_SPAN and not length & (length - 1) and start % length == 0


def ends(start: int, limit: int) -> Iterator[int]:
    """The versions up to `limit` that a merged patch from `start` may lead to, farthest first."""
    longest = start & -start or 1 << max(0, limit).bit_length()
    while longest >= MIN_SPAN:
        if start + longest <= limit:
            yield start + longest
        longest //= 2


def starts(stop: int) -> Iterator[int]:
    """The versions that a merged patch to `stop` may start from, nearest first."""
    length = MIN_SPAN
    while stop and not stop % length:
        yield stop - length
        length *= 2


def spans(newest: int) -> Iterator[Span]:
    """All spans among versions 0 to `newest`, shorter ones first, by start."""
    length = MIN_SPAN
    while length <= newest:
        for start in range(0, newest - length + 1, length):
            yield start, start + length
        length *= 2


def inside(span: Span) -> Iterator[Span]:
    """All shorter spans within one."""
    length = MIN_SPAN
    while length < span[1] - span[0]:
        for start in range(span[0], span[1], length):
            yield start, start + length
        length *= 2
