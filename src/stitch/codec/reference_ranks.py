"""`ranks` once more, slow and obvious: what its loops are tested against.

Written from docs/format.md in Python integers; shares nothing with the product but the types.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stitch.codec.reference import steps, take_steps
from stitch.codec.words import Words
from stitch.types import FLOAT_DTYPES, Schema

EXPONENT_BITS = {
    "BF16": (7, 14),
    "F16": (10, 14),
    "F32": (23, 30),
    "F8_E4M3": (3, 6),
    "F8_E4M3FNUZ": (3, 6),
    "F8_E5M2": (2, 6),
    "F8_E5M2FNUZ": (2, 6),
    "F64": (52, 62),
}


def exponent(word: int, dtype: str) -> int:
    """The class of one word; 0 for dtypes without an exponent field."""
    if dtype not in EXPONENT_BITS:
        return 0
    low, high = EXPONENT_BITS[dtype]
    found = word >> low & ((1 << (high - low + 1)) - 1)
    return min(max(found - 896, 0), 255) if dtype == "F64" else found


def block_classes(
    schema: Schema, tensor: int, start: int, stop: int, scales: tuple[int, int, int], held: Words
) -> list[int]:
    """Classes of elements [start, stop) of a tensor whose block scales are `held`."""
    index, rows, words = scales
    spec, scale_dtype = schema.tensors[tensor], schema.tensors[index].dtype
    num_rows = 1
    for dim in spec.shape[:-1]:
        num_rows *= dim
    columns = spec.num_words // num_rows
    classes = []
    for f in range(start, stop):
        block = (f // columns // rows) * -(-columns // words) + (f % columns) // words
        scale = int(held[block])
        classes.append(
            exponent(scale, scale_dtype) if scale_dtype in EXPONENT_BITS else scale % 256
        )
    return classes


class Model:
    """Sixteen counts, and the intervals that follow from them."""

    def __init__(self) -> None:
        self.counts = [1] * 16
        self.widths: list[int] = []

    def guess(self, g: int) -> None:
        ratio, a = 32768 + 2560 * g, 65536
        for s in range(16):
            n = (a * ratio) >> 16 if s < 15 else 0
            self.counts[s] = 1 + ((a - n) * 64 >> 16)
            a = n

    def renew(self, most: int) -> None:
        while sum(self.counts) > most:
            self.counts = [(count + 1) // 2 for count in self.counts]
        total = sum(self.counts)
        self.widths = [1 + count * 4080 // total for count in self.counts]
        self.widths[self.counts.index(max(self.counts))] += 4096 - sum(self.widths)

    def low(self, symbol: int) -> int:
        return sum(self.widths[:symbol])


def blocks() -> Iterator[tuple[int, int]]:
    """(symbols in a block, most that counts may add up to before it)."""
    size, most = 8, 80
    while True:
        yield size, most
        size, most = min(2 * size, 256), 8192


@dataclass
class Row:
    """A row of the class table."""

    id: int
    low_gap: int = 0
    guess: int = 0
    low_size: int = 0
    flips: bool = False
    inverted: bool = False
    changed: list[int] = field(default_factory=list)
    """By lane."""
    coded: list[int] = field(default_factory=list)
    base: int = 0
    down: bool = False


@dataclass
class Reader:
    """The bytes of a payload, read from the front."""

    data: bytes
    at: int = 0

    def take(self, count: int) -> bytes:
        self.at += count
        assert self.at <= len(self.data)
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> int:
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return int(value)

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.number("<B")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def row(self) -> Row:
        row = Row(self.number("<B"))
        gap, size = self.number("<B"), self.number("<B")
        row.low_gap, row.guess = gap % 32, gap // 32
        row.inverted, row.flips, row.low_size = bool(size & 1), bool(size & 2), size >> 2
        row.changed = [self.varint() for _ in range(4)]
        row.coded = [self.varint() for _ in range(4)] if row.inverted else row.changed
        base = self.varint()
        row.base, row.down = base >> 1, bool(base & 1)
        return row


@dataclass
class Unfold:
    """Symbols from state numbers."""

    numbers: Sequence[int]
    x: int = 0
    used: int = 2

    def __post_init__(self) -> None:
        self.x = self.numbers[0] + 65536 * self.numbers[1]

    def symbol(self, model: Model) -> int:
        p = self.x % 4096
        symbol = max(s for s in range(16) if model.low(s) <= p)
        self.x = model.widths[symbol] * (self.x // 4096) + p - model.low(symbol)
        if self.x < 65536:
            self.x = 65536 * self.x + self.numbers[self.used]
            self.used += 1
        return symbol

    def run(self, model: Model, wanted: int, more: int = 16) -> list[int]:
        """A run with `wanted` symbols other than `more`."""
        symbols: list[int] = []
        for size, most in blocks():
            if wanted == 0:
                return symbols
            model.renew(most)
            block: list[int] = []
            while len(block) < size and wanted:
                block.append(self.symbol(model))
                wanted -= block[-1] != more
            for symbol in block:
                model.counts[symbol] += 2
            symbols += block
        raise AssertionError("unreachable")


@dataclass
class Bits:
    """Raw bits, the first one lowest."""

    value: int = 0
    at: int = 0

    def take(self, count: int) -> int:
        self.at += count
        return self.value >> (self.at - count) & ((1 << count) - 1)

    def put(self, number: int, count: int) -> None:
        self.value |= (number & ((1 << count) - 1)) << self.at
        self.at += count


def take_ranks(
    payload: bytes,
    schema: Schema,
    dtype: str,
    slices: Sequence[tuple[int, int, int]],
    before: Mapping[int, Words],
    num_changed: int,
) -> Words:
    """The new words (n,) of a bucket of slices (tensor, start, stop)."""
    old = np.concatenate([before[tensor][start:stop] for tensor, start, stop in slices])
    reader = Reader(payload)
    kind, last = reader.take(1), reader.take(1)
    classes: list[int] = []
    for tensor, start, stop in slices:
        if kind == b"\1" and reader.number("<B"):
            scales = (reader.number("<I"), reader.number("<I"), reader.number("<I"))
            classes += block_classes(schema, tensor, start, stop, scales, before[scales[0]])
        else:
            classes += [exponent(int(word), dtype) for word in before[tensor][start:stop]]
    return decode(last + payload[reader.at :], old, dtype, num_changed, classes)


def decode(
    payload: bytes, old: Words, dtype: str, num_changed: int, classes: Sequence[int]
) -> Words:
    """The new words (n,) of a bucket; `payload` without the kind of classes and the scales."""
    reader = Reader(payload)
    rows = [None] * (reader.number("<B") + 1)
    table = [reader.row() for _ in rows]
    assert sum(sum(row.changed) for row in table) == num_changed
    num_bytes = reader.number("<I")
    bits = Bits(int.from_bytes(reader.take(num_bytes), "little"))
    rest = payload[reader.at :]
    states = Unfold(struct.unpack(f"<{len(rest) // 2}H", rest))
    models = [Model() for _ in range(5)]
    new = old.copy()
    for row in table:
        count = sum(row.changed)
        models[0].guess(row.guess)
        gaps = read_gaps(states.run(models[0], sum(row.coded), 15), row, bits)
        flips = states.run(models[1], count) if row.flips else [0] * count
        symbols = [states.run(models[2], flips.count(0)), states.run(models[3], flips.count(1))]
        lengths = states.run(models[4], sum(s >= 14 for run in symbols for s in run))
        values = [read_value(symbols[flip], lengths, row, bits) for flip in flips]
        for lane in range(4):
            members = [i for i, cls in enumerate(classes) if cls == row.id and i % 4 == lane]
            coded = [gaps.pop(0) for _ in range(row.coded[lane])]
            places = changed_members(coded, row.inverted, len(members))
            assert len(places) == row.changed[lane]
            for place in places:
                at = members[place]
                new[at] = moved(old[at : at + 1], values.pop(0), flips.pop(0), dtype)
    assert states.x == 65536
    assert states.used == len(states.numbers)
    assert -(-bits.at // 8) == num_bytes
    assert bits.value >> bits.at == 0
    return new


def read_gaps(symbols: list[int], row: Row, bits: Bits) -> list[int]:
    gaps, quotient = [], 0
    for symbol in symbols:
        quotient += symbol
        if symbol < 15:
            gaps.append(quotient << row.low_gap)
            quotient = 0
    return [gap + bits.take(row.low_gap) for gap in gaps]


def read_value(symbols: list[int], lengths: list[int], row: Row, bits: Bits) -> int:
    symbol = symbols.pop(0)
    quotient = symbol // 2
    if quotient == 7:
        length = lengths.pop(0)
        if length == 15:
            length += bits.take(6)
        quotient = (1 << length) + bits.take(length) + 6
    excess = (quotient << row.low_size) + bits.take(row.low_size)
    size = row.base - excess if row.down else row.base + excess
    return -size if symbol % 2 else size


def changed_members(gaps: list[int], inverted: bool, size: int) -> list[int]:
    """Ranks that change, of a class and lane with `size` elements."""
    ranks, rank = [], -1
    for gap in gaps:
        rank += gap + 1
        ranks.append(rank)
    assert rank < size or not gaps
    return sorted(set(range(size)) - set(ranks)) if inverted else ranks


def moved(old: Words, value: int, flip: int, dtype: str) -> int:
    """The word that lies `value` from `old` (1,)."""
    if dtype not in FLOAT_DTYPES:
        assert not flip
        return int(take_steps(old, np.array([value], object), dtype)[0])
    top = 8 * old.itemsize - 1
    word = int(old[0])
    size = word % (1 << top) + value
    assert 0 <= size < 1 << top
    return ((word >> top) ^ flip) << top | size


# The other way round.


@dataclass
class Choices:
    """What a writer is free to choose; these need not be good choices."""

    low_gap: int = 0
    guess: int = 3
    low_size: int = 0
    invert: bool = False
    down: bool = False
    always_flips: bool = False


@dataclass
class Writer:
    """Intervals of all symbols so far, and raw bits."""

    intervals: list[tuple[int, int]] = field(default_factory=list)
    bits: Bits = field(default_factory=Bits)

    def run(self, model: Model, symbols: list[int]) -> None:
        rest = list(symbols)
        for size, most in blocks():
            if not rest:
                return
            model.renew(most)
            block, rest = rest[:size], rest[size:]
            self.intervals += [(model.low(s), model.widths[s]) for s in block]
            for symbol in block:
                model.counts[symbol] += 2

    def states(self) -> bytes:
        x, numbers = 65536, []
        for low, width in reversed(self.intervals):
            if x >= width << 20:
                numbers.append(x % 65536)
                x //= 65536
            x = (x // width << 12) + x % width + low
        numbers += [x // 65536, x % 65536]
        return struct.pack(f"<{len(numbers)}H", *reversed(numbers))


def varint(number: int) -> bytes:
    out = b""
    while number >= 128:
        out += bytes([number % 128 + 128])
        number //= 128
    return out + bytes([number])


def values_and_flips(old: Words, new: Words, dtype: str) -> list[tuple[int, int]]:
    if dtype not in FLOAT_DTYPES:
        return [(int(step), 0) for step in steps(old, new, dtype)]
    top = 8 * old.itemsize - 1
    pairs = []
    for a, b in zip(old.tolist(), new.tolist(), strict=True):
        pairs.append((b % (1 << top) - a % (1 << top), (a ^ b) >> top))
    return pairs


def encode(old: Words, new: Words, dtype: str, classes: Sequence[int], choices: Choices) -> bytes:
    """A payload for one bucket, without the kind of classes and the scales."""
    writer, models, rows = Writer(), [Model() for _ in range(5)], b""
    ids = sorted({cls for cls, a, b in zip(classes, old, new, strict=True) if a != b})
    for cls in ids:
        changed: list[int] = []
        gaps: list[int] = []
        coded: list[int] = []
        at: list[int] = []
        for lane in range(4):
            run, before = 0, len(gaps)
            members = [i for i, other in enumerate(classes) if other == cls and i % 4 == lane]
            differing = [i for i in members if old[i] != new[i]]
            for i in members:
                if (old[i] != new[i]) != choices.invert:
                    gaps.append(run)
                    run = 0
                else:
                    run += 1
            changed.append(len(differing))
            coded.append(len(gaps) - before)
            at += differing
        pairs = values_and_flips(old[at], new[at], dtype)
        sizes = [abs(value) for value, _ in pairs]
        base = max(sizes) if choices.down else min(sizes)
        flips = choices.always_flips or any(flip for _, flip in pairs)
        rows += bytes(
            [
                cls,
                choices.low_gap + 32 * choices.guess,
                4 * choices.low_size + 2 * flips + choices.invert,
            ]
        )
        rows += b"".join(map(varint, changed + (coded if choices.invert else [])))
        rows += varint(2 * base + choices.down)
        write_class(writer, models, gaps, pairs, base, flips, choices)
    bits = writer.bits.value.to_bytes(-(-writer.bits.at // 8), "little")
    return bytes([len(ids) - 1]) + rows + struct.pack("<I", len(bits)) + bits + writer.states()


def write_class(
    writer: Writer,
    models: list[Model],
    gaps: list[int],
    pairs: list[tuple[int, int]],
    base: int,
    flips: bool,
    choices: Choices,
) -> None:
    models[0].guess(choices.guess)
    symbols = []
    for gap in gaps:
        quotient = gap >> choices.low_gap
        symbols += [15] * (quotient // 15) + [quotient % 15]
        writer.bits.put(gap, choices.low_gap)
    writer.run(models[0], symbols)
    if flips:
        writer.run(models[1], [flip for _, flip in pairs])
    runs: list[list[int]] = [[], []]
    lengths = []
    for value, flip in pairs:
        excess = base - abs(value) if choices.down else abs(value) - base
        quotient = excess >> choices.low_size
        runs[flip].append(2 * min(quotient, 7) + (value < 0))
        if quotient >= 7:
            length = (quotient - 6).bit_length() - 1
            lengths.append(min(length, 15))
            if length >= 15:
                writer.bits.put(length - 15, 6)
            writer.bits.put(quotient - 6, length)
        writer.bits.put(excess, choices.low_size)
    writer.run(models[2], runs[0])
    writer.run(models[3], runs[1])
    writer.run(models[4], lengths)
