"""Forged `ranks`: class tables with any field at its extremes, around any states and raw bits.

tests/codec/test_codec_bounds.py runs these with loops that check every index.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from codec_cases import from_words
from patch_damage import Subject, check_payload

from stitch.codec import Bucket, DigestState, Slice
from stitch.codec.ranks import class_loops, coder_loops
from stitch.codec.ranks.table import (
    BASE,
    CHANGED,
    CODED,
    COLUMNS,
    DOWN,
    FLIPS,
    GAP_SHIFT,
    INVERTED,
    LOWEST_RATIO,
    MAX_BASE,
    RATIO,
    RATIO_STEP,
    VALUE_SHIFT,
)
from stitch.codec.words import WORD_DTYPES

SIZE = 203
"""Words of the bucket; all are of class CLASS, or 0 for dtypes without exponents."""
CLASS = {"BF16": 127, "F64": 127, "I8": 0, "I64": 0}
ONE = {"BF16": 0x3F80, "F64": 0x3FF0000000000000, "I8": 1, "I64": 1}
DTYPES = sorted(CLASS)


@dataclass(frozen=True)
class Row:
    """A row of the class table as it is written; fields may be more than a table can hold."""

    cls: int
    changed: int = 3
    coded: int | None = None
    guess: int = 0
    gap_shift: int = 0
    value_shift: int = 0
    flips: int = 0
    down: int = 0
    base: int = 1
    inverted: int = 0

    def to_bytes(self) -> bytes:
        value = self.value_shift << 2 | self.flips << 1 | self.inverted
        out = bytes([self.cls, self.gap_shift | self.guess << 5, value])
        changed = by_lane(self.changed)
        out += b"".join(map(varint, changed))
        if self.inverted:
            rest = [size - count for size, count in zip(by_lane(SIZE), changed, strict=True)]
            coded = rest if self.num_gaps == SIZE - self.changed else by_lane(self.num_gaps)
            out += b"".join(map(varint, coded))
        return out + varint(self.base << 1 | self.down)

    @property
    def num_gaps(self) -> int:
        return self.changed if self.coded is None else self.coded


def by_lane(count: int) -> list[int]:
    """As SIZE elements lie in the lanes; all in the first one if they are one or two."""
    return [count, 0, 0, 0] if count < 3 else [(count + 3 - lane) // 4 for lane in range(4)]


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def forged(rows: list[Row], bits: bytes, states: bytes) -> bytes:
    table = b"".join(row.to_bytes() for row in rows)
    return bytes([0, len(rows) - 1]) + table + struct.pack("<I", len(bits)) + bits + states


def subject_of(dtype: str) -> Subject:
    words = np.full(
        SIZE, ONE[dtype], WORD_DTYPES[8 if "64" in dtype else 2 if "16" in dtype else 1]
    )
    weights = from_words({"a": (dtype, words)})
    state = DigestState.of(weights, threads=1)
    return Subject(weights, weights, state, state, {}, {})


SUBJECTS = {dtype: subject_of(dtype) for dtype in DTYPES}


def outcome(dtype: str, payload: bytes, num_changed: int) -> Exception | None:
    bucket = Bucket(dtype, (Slice(0, 0, SIZE),))
    return check_payload("ranks", payload, num_changed, bucket, SUBJECTS[dtype])


def coded(
    row: Row, gaps: list[int], excesses: list[int], signs: list[int], flips: list[int]
) -> bytes:
    """A payload of one class with these gaps, and sizes that lie `excesses` from the base.

    Written by the encoder's own loops, which do not ask whether it makes sense.
    """
    table = np.zeros((1, COLUMNS), np.int64)
    table[0, [CHANGED, CODED, GAP_SHIFT]] = row.changed, row.num_gaps, row.gap_shift
    table[0, [INVERTED, FLIPS, DOWN]] = row.inverted, row.flips, 0
    table[0, [VALUE_SHIFT, BASE]] = row.value_shift, 0
    table[0, RATIO] = LOWEST_RATIO + row.guess * RATIO_STEP
    values = np.array(
        [-excess if sign else excess for excess, sign in zip(excesses, signs, strict=True)],
        np.int64,
    )
    room = 3 * len(values) + sum((gap >> row.gap_shift) // 15 + 1 for gap in gaps)
    scratch = np.empty((4, room), np.uint8)
    lows, widths = np.empty(room, np.uint16), np.empty(room, np.uint16)
    bits, used = np.zeros(2 * room + 2, np.uint64), np.zeros(2, np.int64)
    class_loops.encode()(
        table,
        np.array(gaps, np.uint32),
        values,
        np.array(flips, np.uint8),
        scratch,
        lows,
        widths,
        bits,
        used,
    )
    out = np.empty(used[0] + 2, np.uint16)
    first = coder_loops.fold()(lows[: used[0]], widths[: used[0]], out)
    return forged([row], bits.tobytes()[: -(-int(used[1]) // 8)], out[first:].tobytes())


def field_values() -> Iterator[dict[str, Any]]:
    yield {}
    yield from ({"guess": guess} for guess in range(8))
    yield from ({"gap_shift": shift} for shift in (1, 7, 8, 26, 27, 28, 31))
    yield from ({"value_shift": shift} for shift in (1, 15, 31, 32, 61, 62, 63))
    yield from (
        {"changed": count} for count in (0, 1, 2, SIZE - 1, SIZE, SIZE + 1, 1 << 28, 1 << 64)
    )
    counts = (0, 1, SIZE - 3, SIZE, SIZE + 1, (1 << 28) + 1, (1 << 63) - 1)
    yield from ({"inverted": 1, "coded": count} for count in counts)
    yield {"inverted": 1, "coded": 0, "changed": SIZE}
    bases = (0, 2, 127, 1 << 15, 1 << 31, 1 << 61, MAX_BASE, MAX_BASE + 1, 1 << 63)
    yield from ({"base": base, "down": down} for base in bases for down in (0, 1))
    yield from ({"cls": cls} for cls in (0, 1, 126, 127, 128, 255))
    yield {"flips": 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_field_of_the_table_at_each_extreme_before_any_states(dtype: str) -> None:
    rng = np.random.default_rng(1)
    honest = Row(CLASS[dtype])
    for first in field_values():
        for second in field_values():
            if rng.random() > 0.25:
                continue
            row = replace(honest, **first, **{k: v for k, v in second.items() if k not in first})
            bits, states = (rng.bytes(int(rng.integers(0, 40))) for _ in range(2))
            payload = forged([row], bits, states + bytes(len(states) % 2))
            outcome(dtype, payload, min(max(row.changed, 1), SIZE))
        for size in (0, 2, 3, 4, 6):
            assert outcome(dtype, forged([row], b"", rng.bytes(size)), 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_and_bits_of_every_length(dtype: str) -> None:
    rng = np.random.default_rng(2)
    rows = [
        Row(CLASS[dtype], changed=90, gap_shift=3, value_shift=5),
        Row(CLASS[dtype], changed=60, inverted=1, coded=SIZE - 60, guess=7),
        Row(CLASS[dtype], changed=90, flips=1, base=0, down=1),
        Row(CLASS[dtype], changed=1, value_shift=62, base=MAX_BASE),
    ]
    for row in rows:
        for length in range(70):
            for fill in (bytes, lambda n: b"\xff" * n, rng.bytes):
                payload = forged([row], fill(length), fill(2 * (70 - length)))
                outcome(dtype, payload, row.changed)
                outcome(dtype, forged([row], fill(3), fill(2 * length)), row.changed)


EXTREME_VALUES = [
    # row, gaps, excesses, signs, flips, whether BF16 may accept it
    (Row(0, changed=1, base=0), [0], [1], [0], [0], True),
    (Row(0, changed=1, base=0), [0], [0], [0], [0], False),
    (Row(0, changed=1, base=0, flips=1), [0], [0], [0], [1], True),
    (Row(0, changed=1, base=2, down=1, flips=1), [0], [2], [0], [1], True),
    (Row(0, changed=1, base=2, down=1, flips=1), [0], [2], [1], [1], False),
    (Row(0, changed=1, base=3, down=1), [50], [2], [1], [0], True),
    (Row(0, changed=1, base=3, down=1), [50], [3], [1], [0], False),
    (Row(0, changed=1, base=3, down=1), [50], [4], [1], [0], False),
    (Row(0, changed=1, base=3, down=1), [50], [1 << 62], [1], [0], False),
    (Row(0, changed=1), [51], [0], [0], [0], False),
    (Row(0, changed=1), [1 << 16], [0], [0], [0], False),
    (Row(0, changed=1, gap_shift=27), [5], [0], [0], [0], True),
    (Row(0, changed=1, gap_shift=27), [(1 << 27) - 1], [0], [0], [0], False),
    (Row(0, changed=1, gap_shift=27), [1 << 27], [0], [0], [0], False),
    (Row(0, changed=1, gap_shift=27), [(1 << 32) - 1], [0], [0], [0], False),
    (Row(0, changed=2), [50, 0], [0, 0], [0, 0], [0, 0], False),
    (Row(0, changed=1, value_shift=62), [0], [0], [0], [0], True),
    (Row(0, changed=1, value_shift=62, base=MAX_BASE), [0], [1 << 62], [1], [0], False),
    (Row(0, changed=1, value_shift=62, base=MAX_BASE), [0], [(1 << 63) - 1], [1], [0], False),
    (Row(0, changed=1, base=MAX_BASE), [0], [(1 << 62) + 1], [1], [0], False),
    (Row(0, changed=1, base=MAX_BASE), [0], [(1 << 62) + 1], [0], [0], False),
    (Row(0, changed=1, base=MAX_BASE), [0], [(1 << 63) - 1], [0], [0], False),
    (Row(0, changed=1, base=0), [0], [(1 << 63) - 1], [1], [0], False),
    (Row(0, changed=1, base=0), [0], [0x3F80], [1], [0], True),
    (Row(0, changed=1, base=0), [0], [0x3F81], [1], [0], False),
    (Row(0, changed=1, base=0), [0], [0x407F], [0], [0], True),
    (Row(0, changed=1, base=0), [0], [0x4080], [0], [0], False),
    (Row(0, changed=SIZE, inverted=1, coded=0), [], [0] * SIZE, [0] * SIZE, [0] * SIZE, True),
    (Row(0, changed=1, base=1, inverted=1, coded=0), [], [0], [0], [0], False),
    (Row(0, changed=1, base=1, inverted=1, coded=202), [1] + [0] * 201, [0], [0], [0], True),
    (Row(0, changed=1, base=1, inverted=1, coded=202), [0] * 202, [0], [0], [0], True),
    (Row(0, changed=1, base=1, inverted=1, coded=202), [2] + [0] * 201, [0], [0], [0], False),
    (Row(0, changed=1, base=1, inverted=1, coded=203), [0] * 203, [0], [0], [0], False),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(EXTREME_VALUES)))
def test_gaps_and_values_at_their_extremes(case: int) -> None:
    row, gaps, excesses, signs, flips, accepted = EXTREME_VALUES[case]
    for dtype in DTYPES:
        payload = coded(replace(row, cls=CLASS[dtype]), gaps, excesses, signs, flips)
        error = outcome(dtype, payload, row.changed)
        if dtype == "BF16":
            assert (error is None) == accepted, error
        if any(flips) and dtype.startswith("I"):
            assert "does not exist" in str(error) or "changes nothing" in str(error)


def test_classes_out_of_order_or_without_words_are_refused() -> None:
    good = coded(Row(127, changed=1), [0], [0], [0], [0])
    assert outcome("BF16", good, 1) is None
    assert "too few words" in str(outcome("BF16", coded(Row(5, changed=1), [0], [0], [0], [0]), 1))
    for pair in ((127, 127), (127, 5), (255, 0)):
        rows = [Row(cls, changed=1) for cls in pair]
        assert "out of order" in str(outcome("BF16", forged(rows, b"", bytes(8)), 2))
    many = [Row(cls, changed=1) for cls in range(256)]
    assert "256" in str(outcome("BF16", forged(many, b"", bytes(8)), SIZE))


def test_numbers_of_the_table_may_not_be_padded_or_endless() -> None:
    row = Row(127).to_bytes()
    for number in (b"\x83\x00", b"\x80" * 9 + b"\x01", b"\xff" * 40, b"\x80" * 8):
        lied = row[:3] + number + row[4:]
        payload = bytes([0, 0]) + lied + struct.pack("<I", 0) + bytes(8)
        assert outcome("BF16", payload, 3) is not None


@pytest.mark.parametrize("num_bytes", [3, 4, 5, 1 << 31, (1 << 32) - 1])
def test_raw_bits_that_are_not_there_are_refused(num_bytes: int) -> None:
    payload = bytearray(coded(Row(127, changed=1, value_shift=9), [0], [0], [0], [0]))
    at = payload.index(struct.pack("<I", 2), 5)
    payload[at : at + 4] = struct.pack("<I", num_bytes)
    assert outcome("BF16", bytes(payload), 1) is not None
