"""Handles on a streamed answer, for synchronous and for asynchronous callers."""

from __future__ import annotations

import asyncio
from types import TracebackType

from stitch.client.events import Event, OpenStream
from stitch.client.loop import LoopThread


class _Handle:
    """What both kinds of stream know about the answer."""

    def __init__(self, loop: LoopThread, opened: OpenStream) -> None:
        self._loop = loop
        self._opened = opened

    @property
    def version_start(self) -> int | None:
        """Version on which the answer began."""
        return self._opened.version_start

    @property
    def version_end(self) -> int | None:
        """Version on which the answer ended; None until the last event was read."""
        return self._opened.version_end

    @property
    def replica(self) -> str:
        return self._opened.replica

    @property
    def run(self) -> str | None:
        return self._opened.run

    @property
    def run_end(self) -> str | None:
        """Run of `version_end`: another one if the replica went over to it meanwhile."""
        return self._opened.run_end

    @property
    def attempts(self) -> int:
        return self._opened.attempts


class Stream(_Handle):
    """Iterate over events; close it, or leave its `with` block, to abort the generation."""

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        event = self._loop.call(self._opened.next_event())
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        self._loop.call(self._opened.aclose())

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncStream(_Handle):
    """The same for `async for` and `async with`, on any event loop."""

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Event:
        event = await asyncio.wrap_future(self._loop.submit(self._opened.next_event()))
        if event is None:
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        await asyncio.wrap_future(self._loop.submit(self._opened.aclose()))

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
