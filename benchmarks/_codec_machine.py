"""What a second CPU of this machine adds at all, to work that no memory holds up.

On rented machines two CPUs are often two hardware threads of one core, which share what adds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from stitch.codec.compiling import compiled

_TURNS = 20_000_000
_ROUNDS = 5


@cache
def _add() -> Callable[..., Any]:
    """(turns) -> a number: eight sums at a time, which do not wait for each other."""

    def loop(turns):  # type: ignore[no-untyped-def]
        a, b, c, d = np.int64(1), np.int64(2), np.int64(3), np.int64(4)
        e, f, g, h = np.int64(5), np.int64(6), np.int64(7), np.int64(8)
        for i in range(turns):
            a += i ^ b
            b ^= i + 3
            c += i ^ d
            d ^= i + 5
            e += i ^ f
            f ^= i + 7
            g += i ^ h
            h ^= i + 9
        return a + b + c + d + e + f + g + h

    return compiled(loop, types.int64, types.int64)


def second_cpu() -> float:
    """How many times as much arithmetic two threads get done as one; about 2 on two cores."""
    add = _add()

    def elapsed_s(count: int) -> float:
        threads = [threading.Thread(target=add, args=(_TURNS,)) for _ in range(count)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    rounds = [(elapsed_s(1), elapsed_s(2)) for _ in range(_ROUNDS)]
    return 2 * min(one for one, _ in rounds) / min(two for _, two in rounds)
