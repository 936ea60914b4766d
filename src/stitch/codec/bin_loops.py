"""The compiled loops of binned streams: numbers as tokens, coded by rANS, and raw bits.

Import it only through :mod:`stitch.codec.bins`. See docs/format.md, "Binned streams", for what they
write, and :mod:`stitch.codec.compiling` for how they are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from stitch.codec.bins import LOWEST_STATE, STATES, TOKENS, TOTAL, TOTAL_BITS
from stitch.codec.compiling import SIGNED, UINT, compiled, input_array, output_array
from stitch.codec.intrinsics import leading_zeros

_ZERO, _ONE, _31, _32, _63 = (np.uint64(n) for n in (0, 1, 31, 32, 63))
_WORD_BITS = np.uint64(16)
_FULL = np.uint64(32 - TOTAL_BITS)
_LOWEST = np.uint64(LOWEST_STATE)
_TOTAL_BITS, _SLOT = np.uint64(TOTAL_BITS), np.uint64(TOTAL - 1)

OK, SHORT = 0, 1
"""What `read` returns: all is well, or words or bits were too few."""


def _number_type(code: str) -> Any:
    width = int(code[1:])
    return UINT[width] if code[0] == "u" else SIGNED[width]


@cache
def tokenise(code: str) -> Callable[..., Any]:
    """(numbers, shift, fine, tokens, counts, bits) -> number of 32-bit words in bits.

    Numbers (k,) are of numpy type `code`, and their lowest `shift` bits 0. Their tokens, with
    `fine` bits after the leading one, go to tokens (k,), how often each occurs to counts (TOKENS,),
    and the bits left over to bits.
    """
    is_signed, is_wide = code[0] == "i", code[1] == "8"

    def loop(numbers, shift, fine, tokens, counts, bits):  # type: ignore[no-untyped-def]
        partial = np.zeros((4, TOKENS), np.uint32)
        small = _ONE << fine
        held = _ZERO
        used = _ZERO
        at = np.int64(0)
        for i in range(numbers.size):
            if is_signed:
                number = np.int64(numbers[i]) >> np.int64(shift)
                u = np.uint64(number << 1) ^ np.uint64(number >> 63)
            else:
                u = np.uint64(numbers[i]) >> shift
            exponent = _63 - leading_zeros(u | small)
            size = exponent - fine
            # Below `small` the exponent is `fine` too, and the token is the number.
            token = (size << fine) + (u >> size)
            tokens[i] = np.uint8(token)
            partial[i & 3, token] += np.uint32(1)
            rest = u & ((_ONE << size) - _ONE)
            if is_wide and size > _32:
                held |= (rest & np.uint64(0xFFFFFFFF)) << used
                bits[at] = np.uint32(held)
                at += 1
                held >>= _32
                rest >>= _32
                size -= _32
            held |= rest << used
            used += size
            bits[at] = np.uint32(held)
            full = used >> np.uint64(5)
            at += np.int64(full)
            held >>= full << np.uint64(5)
            used &= _31
        bits[at] = np.uint32(held)
        for token in range(TOKENS):
            counts[token] = np.int64(partial[0, token]) + np.int64(partial[1, token])
            counts[token] += np.int64(partial[2, token]) + np.int64(partial[3, token])
        return at + np.int64(used > _ZERO)

    return compiled(
        loop,
        types.int64,
        input_array(_number_type(code)),
        types.uint64,
        types.uint64,
        output_array(types.uint8),
        output_array(types.int64),
        output_array(types.uint32),
    )


@register_jitable
def _push(x, token, widths, starts, inverses, words, at):  # type: ignore[no-untyped-def]
    """Add a token to a state; returns the state, and where the next word goes (downwards)."""
    width = np.uint64(widths[token])
    words[at] = np.uint16(x)
    full = np.uint64(x >= width << _FULL)
    at -= np.int64(full)
    x >>= full * _WORD_BITS
    quotient = np.uint64(np.float64(np.int64(x)) * inverses[token])
    return (quotient << _TOTAL_BITS) + (x - quotient * width) + np.uint64(starts[token]), at


@cache
def push(token_bytes: int = 1) -> Callable[..., Any]:
    """(tokens, widths, starts, inverses, words, states) -> first: code tokens (k,) backwards.

    Tokens have `token_bytes`; widths, starts and inverses are looked up by them. words (k + 1,)
    hold the result from index `first` on, states (STATES,) the last states.
    """

    def loop(tokens, widths, starts, inverses, words, states):  # type: ignore[no-untyped-def]
        at = words.size - 1
        size = tokens.size
        whole = size - size % STATES
        for j in range(STATES):
            states[j] = _LOWEST
        for i in range(size - 1, whole - 1, -1):
            x, at = _push(states[i % STATES], tokens[i], widths, starts, inverses, words, at)
            states[i % STATES] = x
        x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
        for i in range(whole - STATES, -1, -STATES):
            x3, at = _push(x3, tokens[i + 3], widths, starts, inverses, words, at)
            x2, at = _push(x2, tokens[i + 2], widths, starts, inverses, words, at)
            x1, at = _push(x1, tokens[i + 1], widths, starts, inverses, words, at)
            x0, at = _push(x0, tokens[i], widths, starts, inverses, words, at)
        states[0], states[1], states[2], states[3] = x0, x1, x2, x3
        return at + 1

    return compiled(
        loop,
        types.int64,
        input_array(UINT[token_bytes]),
        input_array(types.uint32),
        input_array(types.uint32),
        input_array(types.float64),
        output_array(types.uint16),
        output_array(types.uint64),
    )


@cache
def measure() -> Callable[..., Any]:
    """(counts, widths, starts, inverses, table) -> (tokens, bytes): what `push` needs.

    Widths (TOKENS,) sum to TOTAL, near the shares of counts (TOKENS,); 0 only where the count is.
    Those of tokens up to the last in use go to table, as they travel; returns how many and their
    bytes.
    """

    def loop(counts, widths, starts, inverses, table):  # type: ignore[no-untyped-def]
        total = np.int64(0)
        used = np.int64(0)
        for token in range(TOKENS):
            total += counts[token]
            if counts[token] > 0:
                used = np.int64(token) + 1
        left = np.int64(TOTAL)
        for token in range(used):
            width = np.int64(counts[token] * TOTAL / total + 0.5)
            if counts[token] > 0 and width == 0:
                width = np.int64(1)
            widths[token] = width
            left -= width
        while left != 0:
            # Where one more or one less changes the size least for the worse.
            best = -1
            least = 0.0
            for token in range(used):
                if widths[token] > 1 or (left > 0 and widths[token] > 0):
                    cost = counts[token] / widths[token]
                    if left > 0:
                        cost = -cost
                    if best < 0 or cost < least:
                        best = token
                        least = cost
            change = 1 if left > 0 else -1
            widths[best] = np.int64(widths[best]) + change
            left -= change
        start = np.int64(0)
        size = 0
        for token in range(used):
            width = np.int64(widths[token])
            starts[token] = start
            start += width
            # A quotient by this, rounded down, is exact for all numbers below 2^32.
            inverses[token] = (1.0 + 2.0**-50) / (width if width > 0 else 1)
            if width >= 128:
                table[size] = np.uint8(width & 127 | 128)
                size += 1
                width >>= 7
            table[size] = np.uint8(width)
            size += 1
        return used, size

    return compiled(
        loop,
        types.UniTuple(types.int64, 2),
        input_array(types.int64),
        output_array(types.uint32),
        output_array(types.uint32),
        output_array(types.float64),
        output_array(types.uint8),
    )


@cache
def fill_slots() -> Callable[..., Any]:
    """(table, tokens, slots) -> bytes: the slots of `read` from widths as they travel.

    Returns how many bytes of the table the widths of all tokens took, or -1 if they do not sum to
    TOTAL or the last is 0.
    """

    def loop(table, tokens, slots):  # type: ignore[no-untyped-def]
        at = 0
        start = np.int64(0)
        width = np.int64(0)
        for token in range(tokens):
            if at + 1 >= table.size:
                return -1
            width = np.int64(table[at])
            at += 1
            if width >= 128:
                width += (np.int64(table[at]) << 7) - 128
                at += 1
            if start + width > TOTAL:
                return -1
            for offset in range(width):
                slots[start + offset] = np.uint32((width - 1) << 20 | offset << 8 | token)
            start += width
        return at if start == TOTAL and width > 0 else -1

    return compiled(
        loop, types.int64, input_array(types.uint8), types.int64, output_array(types.uint32)
    )


@register_jitable
def pop(x, slots, words, at):  # type: ignore[no-untyped-def]
    """Take a token from a state; returns the state, the token, and where the next word is."""
    slot = slots[x & _SLOT]
    width = np.uint64(slot >> np.uint32(20)) + _ONE
    offset = np.uint64(slot >> np.uint32(8)) & _SLOT
    x = width * (x >> _TOTAL_BITS) + offset
    low = np.uint64(x < _LOWEST)
    x = x << (low * _WORD_BITS) | np.uint64(words[at]) * low
    return x, np.uint64(slot & np.uint32(255)), at + low


@cache
def read(code: str) -> Callable[..., Any]:
    """(slots, shift, fine, words, bits, bit_words, states, numbers, ends) -> OK or SHORT.

    slots (TOTAL,): width - 1, offset in the token's interval and token of each slot, in 12, 12 and
    8 bits. words and bits have STATES and 3 more words than they should. ends (2,) get the words
    and the bits that were read; states (STATES,) what is left of them.
    """
    is_signed, is_wide = code[0] == "i", code[1] == "8"
    number_type = getattr(np, {"i": "int", "u": "uint"}[code[0]] + str(8 * int(code[1:])))

    @register_jitable
    def number(u, shift):  # type: ignore[no-untyped-def]
        if is_signed:
            return number_type((np.int64(u >> _ONE) ^ -np.int64(u & _ONE)) << np.int64(shift))
        return number_type(u << shift)

    @register_jitable
    def value(token, shift, least, sizes, bits, place):  # type: ignore[no-untyped-def]
        """The number of a token, and the bits up to its end."""
        size = np.uint64(sizes[token])
        u = least[token]
        if is_wide and size > _32:
            at = place >> np.uint64(5)
            low = np.uint64(bits[at]) | np.uint64(bits[at + _ONE]) << _32
            rest = (low >> (place & _31)) & np.uint64(0xFFFFFFFF)
            place += _32
            at += _ONE
            high = np.uint64(bits[at]) | np.uint64(bits[at + _ONE]) << _32
            rest |= (high >> (place & _31)) << _32
            u |= rest & ((_ONE << size) - _ONE)
            return number(u, shift), place + size - _32
        at = place >> np.uint64(5)
        pair = np.uint64(bits[at]) | np.uint64(bits[at + _ONE]) << _32
        u |= (pair >> (place & _31)) & ((_ONE << size) - _ONE)
        return number(u, shift), place + size

    def loop(slots, shift, fine, words, bits, bit_words, states, numbers, ends):  # type: ignore[no-untyped-def]
        # The least number of each token, and how many more bits its numbers have.
        least = np.empty(TOKENS, np.uint64)
        sizes = np.empty(TOKENS, np.uint8)
        for token in range(TOKENS):
            size = np.uint64(token) >> fine
            size -= np.uint64(size > _ZERO)
            size = min(size, _63)
            least[token] = (np.uint64(token) - (size << fine)) << size
            sizes[token] = np.uint8(size)
        at = _ZERO
        place = _ZERO
        last_word = np.uint64(words.size - STATES)
        last_bit = np.uint64(bit_words) * _32
        whole = numbers.size - numbers.size % STATES
        x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
        for i in range(0, whole, STATES):
            if at > last_word or place > last_bit:
                return SHORT
            x0, token0, at = pop(x0, slots, words, at)
            x1, token1, at = pop(x1, slots, words, at)
            x2, token2, at = pop(x2, slots, words, at)
            x3, token3, at = pop(x3, slots, words, at)
            numbers[i], place = value(token0, shift, least, sizes, bits, place)
            numbers[i + 1], place = value(token1, shift, least, sizes, bits, place)
            numbers[i + 2], place = value(token2, shift, least, sizes, bits, place)
            numbers[i + 3], place = value(token3, shift, least, sizes, bits, place)
        states[0], states[1], states[2], states[3] = x0, x1, x2, x3
        if at > last_word or place > last_bit:
            return SHORT
        for i in range(whole, numbers.size):
            x, token, at = pop(states[i - whole], slots, words, at)
            states[i - whole] = x
            numbers[i], place = value(token, shift, least, sizes, bits, place)
        ends[0] = at
        ends[1] = place
        return OK

    return compiled(
        loop,
        types.int64,
        input_array(types.uint32),
        types.uint64,
        types.uint64,
        input_array(types.uint16),
        input_array(types.uint32),
        types.int64,
        output_array(types.uint64),
        output_array(_number_type(code)),
        output_array(types.uint64),
    )
