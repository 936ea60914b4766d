"""Finding the end of a sequence of keys that is only ever extended by its next number."""

from __future__ import annotations

from collections.abc import Callable


def last_in_sequence(
    exists: Callable[[int], bool],
    known: int,
    *,
    limit: int,
    hint: Callable[[], int | None] = lambda: None,
) -> int:
    """The number n >= `known` such that n exists (or is `known`) and n + 1 does not.

    Costs one `exists` if nothing follows `known`, two if one number does. Further ahead, `hint()`
    may name the end, to be searched on from; without it the end is found by doubling strides and
    bisection. A number that is jumped to counts only if the one before it exists too, so that a
    number beyond a gap is not taken for the end.
    """

    def present(number: int) -> bool:
        return number <= limit and exists(number)

    def joined(number: int) -> bool:
        return present(number) and present(number - 1)

    for low in (known, known + 1):
        if not present(low + 1):
            return low
    low = known + 2
    guess = hint()
    if guess is not None and guess > low and joined(guess):
        low = guess
    stride = 1
    while joined(low + stride):
        low += stride
        stride *= 2
    high = low + stride
    while high - low > 1:
        middle = (low + high) // 2
        if joined(middle):
            low = middle
        else:
            high = middle
    return low
