"""Turns: operations on an engine that run one at a time, and each to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Turns:
    """Operations go on when their callers are cancelled: none is ever left half done."""

    def __init__(self) -> None:
        self.num_begun = 0
        """Operations so far, with the one under way."""
        self._order = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        return self._order.locked()

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """What `work` returns or raises; it begins when all before it have ended."""
        task = asyncio.create_task(self._alone(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_mark_seen)
        return await asyncio.shield(task)

    async def all_ended(self) -> None:
        """Wait for what is under way, whatever comes of it."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _alone(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        async with self._order:
            self.num_begun += 1
            return await work


def _mark_seen(task: asyncio.Task[Any]) -> None:
    """Fetch the outcome, so that an error whose caller left is not reported as never retrieved."""
    if not task.cancelled():
        task.exception()
