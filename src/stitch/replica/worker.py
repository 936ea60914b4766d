"""The one thread in which a replica does its blocking work: fetch, decode, mirror."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """Runs functions one after the other, off the event loop."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._stopping = threading.Event()

    def stopping(self) -> bool:
        """Asked by long work between its steps, in the thread."""
        return self._stopping.is_set()

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work(...)`; raises what it raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, functools.partial(work, *args, **kwargs))

    async def close(self) -> None:
        """Ask running work to stop at its next step and wait for it."""
        self._stopping.set()
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)
