"""An event loop on a thread of its own, for synchronous callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from stitch.errors import UsageError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads. Its thread is a daemon: it never keeps a process alive."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._lock = threading.Lock()
        self._closed = False
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine; cancelling the future cancels it. UsageError once closed."""
        with self._lock:
            problem = self._problem()
            if not problem:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise UsageError(problem)

    def _problem(self) -> str:
        if self._closed:
            return "the client is closed"
        if os.getpid() != self._pid:
            return "the client was made in another process; make one after forking"
        return ""

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for its result; an interrupt cancels it."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise UsageError(
                "a waiting call was made on the client's own thread (from a future's callback?); "
                "use submit() there"
            )
        try:
            return result_of(self.submit(coroutine))
        except concurrent.futures.CancelledError:
            if self._closed:
                raise UsageError("the client was closed during the call") from None
            raise

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel everything, run `last`, stop the thread. A second call does nothing."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                last.close()
                return
            self._closed = True
            future = asyncio.run_coroutine_threadsafe(self._finish(last), self._loop)
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        if threading.current_thread() is self._thread:
            return
        future.result()
        self._thread.join()
        self._loop.close()

    async def _finish(self, last: Coroutine[Any, Any, None]) -> None:
        current = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not current]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        await last
        await self._loop.shutdown_asyncgens()


def result_of(future: concurrent.futures.Future[T]) -> T:
    """The future's result; whatever interrupts the wait cancels the work."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
