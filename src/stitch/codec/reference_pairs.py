"""Paired streams once more, slow and obvious; see :mod:`stitch.codec.reference`."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence

from stitch.codec.reference_bins import (
    LOWEST,
    TOTAL,
    popped,
    pushed,
    shares,
    tokenised,
    untokenised,
)


def write_paired(gaps: Sequence[int], steps: Sequence[int], fine: int, shift: int) -> bytes:
    """The body of a stream holding these gaps, each with its step, a multiple of 2^shift."""
    coded, bits, size = [], 0, 0
    for gap, step in zip(gaps, steps, strict=True):
        token, r, low = tokenised(gap, fine)
        bits |= low << size
        twice = 2 * (abs(step) >> shift) + (step < 0)
        s = twice.bit_length() - 1
        bits |= twice % (1 << s) << (size + r)
        size += r + s
        coded.append((token, s - 1))
    classes = max(c for _, c in coded) + 1
    tokens = [token * classes + c for token, c in coded]
    widths = shares(Counter(tokens))
    states, words = pushed(tokens, widths)
    head = struct.pack("<BBBH4II", shift, fine, classes - 1, len(widths) - 1, *states, len(words))
    table, zeros = bytearray(), 0
    for width in widths:
        if width == 0 and zeros < 256:
            zeros += 1
            continue
        if zeros:
            table += bytes([0, zeros - 1])
        zeros = int(width == 0)
        if width:
            table += bytes([width] if width < 128 else [width % 128 + 128, width // 128])
    tail = struct.pack(f"<{len(words)}H", *words)
    return head + bytes(table) + tail + bits.to_bytes(-(-size // 8), "little")


def read_paired(body: bytes, count: int) -> tuple[list[int], list[int]]:
    """The `count` gaps and steps in the body of a stream."""
    shift, fine, last_class, last, *states, num_words = struct.unpack_from("<BBBH4II", body)
    at, classes = 25, last_class + 1
    assert shift <= 15
    assert fine <= 2
    assert classes <= 16
    assert last // classes <= tokenised((1 << 28) - 1, fine)[0]
    assert min(states) >= LOWEST
    widths: list[int] = []
    while len(widths) <= last:
        width, following = body[at], body[at + 1]
        at += 1
        if width == 0:
            widths += [0] * (following + 1)
            at += 1
        elif width >= 128:
            widths.append(width - 128 + 128 * following)
            assert widths[-1]
            at += 1
        else:
            widths.append(width)
    assert len(widths) == last + 1
    assert widths[-1]
    assert sum(widths) == TOTAL
    assert len(widths) - widths.count(0) <= 256
    words = list(struct.unpack_from(f"<{num_words}H", body, at))
    packed = body[at + 2 * num_words :]
    bits, place = int.from_bytes(packed, "little"), 0
    gaps, steps = [], []
    for pair in popped(count, widths, states, words):
        gap, r = untokenised(pair // classes, fine)
        gaps.append(gap + (bits >> place) % (1 << r))
        s = pair % classes + 1
        twice = (1 << s) + (bits >> (place + r)) % (1 << s)
        steps.append((-1 if twice % 2 else 1) * (twice // 2) << shift)
        assert -32768 <= steps[-1] <= 32767
        place += r + s
    assert bits >> place == 0
    assert -(-place // 8) == len(packed)
    return gaps, steps
