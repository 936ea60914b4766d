"""Work on 32 bytes at a time, which numba has no name for. Import it only from compiled loops.

LLVM makes of it what the processor has: one AVX2 register, two of SSE2 or NEON. Why the functions
are around intrinsics, and not intrinsics themselves, is told in :mod:`stitch.codec.intrinsics`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

GROUP = 32
"""Bytes that are worked on at a time."""
KINDS = 6
"""Byte values that `tally` counts in one pass: as many as leave their counters in registers."""
MOST_GROUPS = 255
"""Groups that `tally` takes at most: its counters are bytes."""
TALLIES = 4
"""Bytes at offsets that differ modulo this are counted apart."""

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_BYTES = ir.VectorType(_I8, GROUP)
_LOG2_GROUP = GROUP.bit_length() - 1


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any, target: Any) -> Any:
    """To entry `index` of a contiguous array, as a pointer to the LLVM type `target`."""
    made = context.make_array(kind)(context, builder, array)
    return builder.bitcast(builder.gep(made.data, [index]), target.as_pointer())


def _splat(builder: Any, value: Any) -> Any:
    """A vector with the value in each of its GROUP entries."""
    kind = ir.VectorType(value.type, GROUP)
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, GROUP), [0] * GROUP)
    return builder.shuffle_vector(one, undefined, zeros)


def _sum_halves(builder: Any, vector: Any) -> Any:
    """Sums of the entries with an even index, and of those with an odd one, as two entries."""
    size = vector.type.count
    undefined = ir.Constant(vector.type, ir.Undefined)
    while size > 2:
        size //= 2
        halves = [
            ir.Constant(ir.VectorType(_I32, size), list(range(first, first + size)))
            for first in (0, size)
        ]
        low, high = (builder.shuffle_vector(vector, undefined, half) for half in halves)
        vector = builder.add(low, high)
        undefined = ir.Constant(vector.type, ir.Undefined)
    return vector


@intrinsic
def _shift_to_bytes(typingctx, words, shift, mask, groups, out):  # type: ignore[no-untyped-def]
    bits = words.dtype.bitwidth
    word = ir.IntType(bits)

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        shifts = _splat(builder, builder.trunc(arguments[1], word))
        masks = _splat(builder, builder.trunc(arguments[2], word))
        source, target = signature.args[0], signature.args[4]
        with cgutils.for_range(builder, arguments[3], intp=_I64) as loop:
            at = builder.shl(loop.index, ir.Constant(_I64, _LOG2_GROUP))
            vector = ir.VectorType(word, GROUP)
            loaded = builder.load(
                _pointer(context, builder, source, arguments[0], at, vector), align=1
            )
            field = builder.and_(builder.lshr(loaded, shifts), masks)
            if bits > 8:
                field = builder.trunc(field, _BYTES)
            builder.store(
                field, _pointer(context, builder, target, arguments[4], at, _BYTES), align=1
            )
        return context.get_dummy_value()

    return types.void(words, types.uint64, types.uint64, types.int64, out), generate


@intrinsic
def _tally(typingctx, data, groups, first, counts, row_size, phase):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, groups, first, _, row_size, phase = arguments
        values = [builder.add(first, ir.Constant(_I8, number)) for number in range(KINDS)]
        kinds = [_splat(builder, value) for value in values]
        none = ir.Constant(_BYTES, [0] * GROUP)
        counters = [cgutils.alloca_once_value(builder, none) for _ in kinds]
        with cgutils.for_range(builder, groups, intp=_I64) as loop:
            at = builder.shl(loop.index, ir.Constant(_I64, _LOG2_GROUP))
            place = _pointer(context, builder, signature.args[0], arguments[0], at, _BYTES)
            loaded = builder.load(place, align=1)
            for kind, counter in zip(kinds, counters, strict=True):
                minus_one = builder.sext(builder.icmp_unsigned("==", loaded, kind), _BYTES)
                builder.store(builder.sub(builder.load(counter), minus_one), counter)
        pairs = ir.VectorType(_I16, GROUP // 2)
        for value, counter in zip(values, counters, strict=True):
            both = builder.bitcast(builder.load(counter), pairs)
            column = builder.zext(value, _I64)
            low = builder.and_(both, ir.Constant(pairs, [0xFF] * pairs.count))
            high = builder.lshr(both, ir.Constant(pairs, [8] * pairs.count))
            # Even offsets are in the low bytes: entry 0 of their sums has those of 0 modulo 4.
            for parity, half in enumerate((low, high)):
                sums = _sum_halves(builder, half)
                for entry in range(2):
                    count = builder.extract_element(sums, ir.Constant(_I32, entry))
                    row = builder.add(phase, ir.Constant(_I64, parity + 2 * entry))
                    row = builder.and_(row, ir.Constant(_I64, TALLIES - 1))
                    at = builder.add(builder.mul(row, row_size), column)
                    place = _pointer(context, builder, signature.args[3], arguments[3], at, _I32)
                    found = builder.add(builder.load(place, align=1), builder.zext(count, _I32))
                    builder.store(found, place, align=1)
        return context.get_dummy_value()

    arguments = data, types.int64, types.uint8, counts, types.int64, types.int64
    return types.void(*arguments), generate


@intrinsic
def _equal_bits(typingctx, data, at, value):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = _pointer(context, builder, signature.args[0], arguments[0], arguments[1], _BYTES)
        loaded = builder.load(place, align=1)
        equal = builder.icmp_unsigned("==", loaded, _splat(builder, arguments[2]))
        return builder.bitcast(equal, _I32)

    return types.uint32(data, types.int64, types.uint8), generate


@intrinsic
def _outside_bits(typingctx, data, at, first, count):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = _pointer(context, builder, signature.args[0], arguments[0], arguments[1], _BYTES)
        above = builder.sub(builder.load(place, align=1), _splat(builder, arguments[2]))
        outside = builder.icmp_unsigned(">=", above, _splat(builder, arguments[3]))
        return builder.bitcast(outside, _I32)

    return types.uint32(data, types.int64, types.uint8, types.uint8), generate


@intrinsic
def _one_bits(typingctx, word):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctpop(arguments[0])

    return types.uint32(types.uint32), generate


@register_jitable
def shift_to_bytes(words, shift, mask, groups, out):  # type: ignore[no-untyped-def]
    """out[i] = words[i] >> shift & mask for GROUP * `groups` words (n,) of up to 32 bits.

    `shift` is less than the bits of a word, and `mask` fits a byte.
    """
    return _shift_to_bytes(words, shift, mask, groups, out)


@register_jitable
def tally(data, groups, first, counts, row_size, phase):  # type: ignore[no-untyped-def]
    """Count the bytes from `first` to first + KINDS - 1 in the first GROUP * `groups` of `data`.

    How many bytes of value v are at offsets i with (i + phase) % TALLIES == row is added to
    counts[row * row_size + v] (uint32). At most MOST_GROUPS groups.
    """
    return _tally(data, groups, first, counts, row_size, phase)


@register_jitable
def equal_bits(data, at, value):  # type: ignore[no-untyped-def]
    """32 bits: bit i tells whether data[at + i] is the byte `value`."""
    return _equal_bits(data, at, value)


@register_jitable
def outside_bits(data, at, first, count):  # type: ignore[no-untyped-def]
    """32 bits: bit i tells whether the byte data[at + i] is not one of `count` from `first` on."""
    return _outside_bits(data, at, first, count)


@register_jitable
def one_bits(word):  # type: ignore[no-untyped-def]
    """How many of 32 bits are one."""
    return _one_bits(word)
