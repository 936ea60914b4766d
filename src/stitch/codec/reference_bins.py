"""Binned streams once more, slow and obvious; see :mod:`stitch.codec.reference`."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

TOTAL = 4096
LOWEST = 1 << 16


def tokenised(u: int, fine: int) -> tuple[int, int, int]:
    """(token, r, the r lowest bits) of an unsigned number."""
    if u < 2 << fine:
        return u, 0, 0
    r = u.bit_length() - 1 - fine
    return (r << fine) + (u >> r), r, u % (1 << r)


def untokenised(token: int, fine: int) -> tuple[int, int]:
    """(u without its r lowest bits, r)."""
    if token < 2 << fine:
        return token, 0
    r = (token >> fine) - 1
    return (token - (r << fine)) << r, r


def shares(counts: Mapping[int, int]) -> list[int]:
    """A width for each token up to the last in use, near its share, 1 at least."""
    widths = [0] * (max(counts) + 1)
    left = TOTAL - len(counts)
    for token, count in counts.items():
        widths[token] = 1 + left * count // sum(counts.values())
    widths[-1] += TOTAL - sum(widths)
    return widths


def pushed(tokens: Sequence[int], widths: Sequence[int]) -> tuple[list[int], list[int]]:
    """The four states and the words that hold the tokens."""
    states, words = [LOWEST] * 4, []
    for i, token in reversed(list(enumerate(tokens))):
        x, width = states[i % 4], widths[token]
        if x >= width << 20:
            words.append(x % 65536)
            x >>= 16
        states[i % 4] = x // width * TOTAL + x % width + sum(widths[:token])
    return states, words[::-1]


def popped(count: int, widths: Sequence[int], states: list[int], words: list[int]) -> Iterator[int]:
    """The `count` tokens that states and words hold, which are then used up."""
    slots = [(token, c) for token, width in enumerate(widths) for c in range(width)]
    for i in range(count):
        x = states[i % 4]
        token, offset = slots[x % TOTAL]
        x = widths[token] * (x // TOTAL) + offset
        states[i % 4] = x * 65536 + words.pop(0) if x < LOWEST else x
        yield token
    assert states == [LOWEST] * 4
    assert not words


def write_binned(numbers: Sequence[int], dtype: np.dtype[Any], fine: int, shift: int) -> bytes:
    """The body of a stream holding `numbers`, all of them multiples of 2^shift."""
    parts = [n >> shift for n in numbers]
    if dtype.kind == "i":
        parts = [2 * v if v >= 0 else -2 * v - 1 for v in parts]
    coded = [tokenised(u, fine) for u in parts]
    widths = shares(Counter(token for token, _, _ in coded))
    states, words = pushed([token for token, _, _ in coded], widths)
    bits = size = 0
    for _, r, low in coded:
        bits |= low << size
        size += r
    head = struct.pack("<BBB4II", shift, fine, len(widths) - 1, *states, len(words))
    table = b"".join(bytes([w]) if w < 128 else bytes([w % 128 + 128, w // 128]) for w in widths)
    tail = struct.pack(f"<{len(words)}H", *words)
    return head + table + tail + bits.to_bytes(-(-size // 32) * 4, "little")


def read_binned(body: bytes, count: int, dtype: np.dtype[Any]) -> list[int]:
    """The `count` numbers in the body of a stream."""
    shift, fine, last, *states, num_words = struct.unpack_from("<BBB4II", body)
    at = 23
    widths: list[int] = []
    while len(widths) <= last:
        width = body[at]
        if width >= 128:
            at += 1
            width += 128 * body[at] - 128
        at += 1
        widths.append(width)
    assert sum(widths) == TOTAL
    words = list(struct.unpack_from(f"<{num_words}H", body, at))
    packed = body[at + 2 * num_words :]
    bits, place = int.from_bytes(packed, "little"), 0
    assert len(packed) % 4 == 0
    numbers = []
    for token in popped(count, widths, states, words):
        u, r = untokenised(token, fine)
        u += (bits >> place) % (1 << r)
        place += r
        if dtype.kind == "i":
            u = u // 2 if u % 2 == 0 else -(u + 1) // 2
        numbers.append(u << shift)
    assert bits >> place == 0
    assert -(-place // 32) * 4 == len(packed)
    return numbers
