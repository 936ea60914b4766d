"""The order of values and zigzag steps, word by word, for the compiled loops that need them.

The numpy form is in :mod:`stitch.codec.ulp`. Import it only through kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba.extending import register_jitable

from stitch.codec.compiling import NUMPY_UINT


@cache
def order(word_bytes: int, ordered: bool) -> tuple[Any, Any]:
    """(number of a word in the order of the values, word of such a number).

    `ordered`: the words are sign and magnitude. Otherwise a word is its own number.
    """
    word = NUMPY_UINT[word_bytes]
    zero, one, top = word(0), word(1), word(8 * word_bytes - 1)
    sign = word(1 << (8 * word_bytes - 1))
    if not ordered:

        @register_jitable
        def same(x):  # type: ignore[no-untyped-def]
            return x

        return same, same

    @register_jitable
    def number(x):  # type: ignore[no-untyped-def]
        return word(x ^ word(sign | word(zero - word(x >> top))))

    @register_jitable
    def back(y):  # type: ignore[no-untyped-def]
        return word(y ^ word(sign | word(word(y >> top) - one)))

    return number, back


@cache
def zigzag(word_bytes: int, ordered: bool) -> tuple[Any, Any]:
    """((old, new) -> zigzag step, (old, zigzag step) -> new), each one word."""
    word = NUMPY_UINT[word_bytes]
    zero, one, top = word(0), word(1), word(8 * word_bytes - 1)
    number, back = order(word_bytes, ordered)

    @register_jitable
    def between(x, y):  # type: ignore[no-untyped-def]
        step = word(number(y) - number(x))
        return word(word(step << one) ^ word(zero - word(step >> top)))

    @register_jitable
    def take(x, z):  # type: ignore[no-untyped-def]
        return back(word(number(x) + word(word(z >> one) ^ word(zero - word(z & one)))))

    return between, take
