"""Run a function over items in a few threads, results in order, with a bounded number in flight.

The threads that help stay for the next time: starting some takes as long as decoding a patch of
a hundred thousand changes.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_DEFAULT_THREADS = 8


def default_threads() -> int:
    """The CPUs this process may use, at most MAX_DEFAULT_THREADS."""
    return max(1, min(MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0))))


class _Helpers:
    """The threads of this process that help, started as they are needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def start(self, work: Callable[[], None]) -> bool:
        """Have a thread call `work`, now or later; False if the interpreter is ending."""
        with self._lock:
            if self._pool is None:
                most = max(MAX_DEFAULT_THREADS, os.cpu_count() or 1)
                self._pool = ThreadPoolExecutor(most, thread_name_prefix="stitch-codec")
            try:
                self._pool.submit(work)
            except RuntimeError:
                return False
            return True


_helpers = _Helpers()


def _forget_helpers() -> None:
    """In a child after a fork: the parent's threads are not there."""
    global _helpers
    _helpers = _Helpers()


os.register_at_fork(after_in_child=_forget_helpers)


class _Task(Generic[Item, Result]):
    def __init__(self, item: Item) -> None:
        self._item: Item | None = item
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()

    @property
    def is_done(self) -> bool:
        return not self._running.locked()

    def run(self, function: Callable[[Item], Result]) -> None:
        try:
            self._result = function(self._item)  # type: ignore[arg-type]
        except BaseException as error:  # raised again where the result is wanted
            self._error = error
        finally:
            self._item = None
            self._running.release()

    def drop(self) -> None:
        """Nobody will run it."""
        self._item = None
        self._running.release()

    def wait(self) -> None:
        with self._running:
            pass

    def result(self) -> Result:
        try:
            if self._error is not None:
                raise self._error
            return self._result  # type: ignore[return-value]
        finally:
            self._result = self._error = None


class _Run(Generic[Item, Result]):
    """Tasks that nobody has begun, and those who may begin them."""

    def __init__(self, function: Callable[[Item], Result], num_helpers: int) -> None:
        self._function, self._num_helpers = function, num_helpers
        self._lock = threading.Lock()
        self._left: deque[_Task[Item, Result]] = deque()
        self._helping = 0

    def add(self, item: Item) -> _Task[Item, Result]:
        task: _Task[Item, Result] = _Task(item)
        with self._lock:
            self._left.append(task)
            wanted = self._helping < self._num_helpers
            self._helping += wanted
        if wanted and not _helpers.start(self._help):
            with self._lock:
                self._helping -= 1
        return task

    def _next(self) -> _Task[Item, Result] | None:
        with self._lock:
            return self._left.popleft() if self._left else None

    def _help(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    self._helping -= 1
                    return
                task = self._left.popleft()
            task.run(self._function)
            del task

    def finish(self, task: _Task[Item, Result]) -> None:
        """Until the task is done, do what nobody has begun; then wait for it."""
        while not task.is_done:
            mine = self._next()
            if mine is None:
                task.wait()
                return
            mine.run(self._function)

    def stop(self) -> None:
        """Begin nothing more."""
        with self._lock:
            stopped, self._left = self._left, deque()
        for task in stopped:
            task.drop()


def ordered(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order, from `threads` threads.

    The caller's is one of them while it waits. At most `2 * threads` results wait, are being made
    or are next in line at any time, so that no thread waits for whoever takes the results. The
    first error is raised in its place, and nothing more is started after it or after the iterator
    is closed; what has been started is waited for.
    """
    threads = default_threads() if threads is None else threads
    if threads <= 1:
        yield from map(function, items)
        return
    source = iter(items)
    run: _Run[Item, Result] = _Run(function, threads - 1)
    waiting = deque(run.add(item) for item in islice(source, 2 * threads))
    try:
        while waiting:
            task = waiting.popleft()
            try:
                run.finish(task)
            except BaseException:
                waiting.appendleft(task)
                raise
            result = task.result()
            for item in islice(source, 1):
                waiting.append(run.add(item))
            yield result
            del result, task
    finally:
        run.stop()
        for task in waiting:
            task.wait()
