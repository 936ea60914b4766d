"""Run a function over items in a few threads, results in order, with a bounded number in flight."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_DEFAULT_THREADS = 8


def default_threads() -> int:
    """The CPUs this process may use, at most MAX_DEFAULT_THREADS."""
    return max(1, min(MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0))))


def ordered(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order, from `threads` threads.

    At most `2 * threads` results wait, are being made or are next in line at any time, so that no
    thread waits for whoever takes the results. The first error is raised in its place, and nothing
    more is started after it or after the iterator is closed.
    """
    threads = default_threads() if threads is None else threads
    if threads <= 1:
        yield from map(function, items)
        return
    source = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="stitch-codec") as pool:
        waiting: deque[Future[Result]] = deque(
            pool.submit(function, item) for item in islice(source, 2 * threads)
        )
        try:
            while waiting:
                result = waiting.popleft().result()
                for item in islice(source, 1):
                    waiting.append(pool.submit(function, item))
                yield result
                del result
        finally:
            for future in waiting:
                future.cancel()
