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
    may name the end: it is believed if that number and the one before it exist, and searched on
    from; otherwise the end is found by doubling strides and bisection.
    """

    def present(number: int) -> bool:
        return number <= limit and exists(number)

    for low in (known, known + 1):
        if not present(low + 1):
            return low
    low = known + 2
    guess = hint()
    if guess is not None and guess > low and present(guess) and present(guess - 1):
        low = guess
    stride = 1
    while present(low + stride):
        low += stride
        stride *= 2
    high = low + stride
    while high - low > 1:
        middle = (low + high) // 2
        if present(middle):
            low = middle
        else:
            high = middle
    return low
