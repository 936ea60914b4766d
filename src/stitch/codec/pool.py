"""Run a function over items in a few threads, results in order, with a bounded number in flight.

The threads that help stay for the next time: starting some takes as long as decoding a patch of
a hundred thousand changes.
"""

from __future__ import annotations

import contextlib
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

    def ask(self, work: Callable[[], None]) -> None:
        """Have a thread call `work` some time; perhaps never, if the interpreter is ending."""
        with self._lock:
            if self._pool is None:
                most = max(MAX_DEFAULT_THREADS, os.cpu_count() or 1)
                self._pool = ThreadPoolExecutor(most, thread_name_prefix="stitch-codec")
            with contextlib.suppress(RuntimeError):
                self._pool.submit(work)


_helpers = _Helpers()


def _forget_helpers() -> None:
    """In a child after a fork: the parent's threads are not there."""
    global _helpers
    _helpers = _Helpers()


os.register_at_fork(after_in_child=_forget_helpers)


class _Task(Generic[Item, Result]):
    """An item, and what became of it."""

    def __init__(self, item: Item) -> None:
        self._item: Item | None = item
        self._result: Result | None = None
        self._error: BaseException | None = None
        self.is_done = False

    def run(self, function: Callable[[Item], Result]) -> None:
        """An Exception is for whoever wants the result; anything else is raised here as well."""
        try:
            self._result = function(self._item)  # type: ignore[arg-type]
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._item = None
            self.is_done = True

    def forget(self) -> None:
        self._item = self._result = self._error = None

    def result(self) -> Result:
        try:
            if self._error is not None:
                raise self._error
            return self._result  # type: ignore[return-value]
        finally:
            self.forget()


class _Run(Generic[Item, Result]):
    """Tasks that nobody has begun, and those who may begin them."""

    def __init__(self, function: Callable[[Item], Result], num_helpers: int) -> None:
        self._function: Callable[[Item], Result] | None = function
        self._num_helpers = num_helpers
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._left: deque[_Task[Item, Result]] = deque()
        self._asked = self._busy = 0
        """Helpers who have been asked and have not left; those who are at a task."""

    def add(self, item: Item) -> _Task[Item, Result]:
        task: _Task[Item, Result] = _Task(item)
        with self._changed:
            self._left.append(task)
            wanted = self._asked < self._num_helpers
            self._asked += wanted
        if wanted:
            _helpers.ask(self._help)
        return task

    def _help(self) -> None:
        while True:
            with self._changed:
                function = self._function
                if not self._left or function is None:
                    self._asked -= 1
                    return
                task = self._left.popleft()
                self._busy += 1
            try:
                with contextlib.suppress(BaseException):  # whoever wants the result gets it
                    task.run(function)
                del task, function
            finally:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def _run_one(self) -> bool:
        """Run a task that nobody has begun; False if there is none."""
        with self._changed:
            function = self._function
            if not self._left or function is None:
                return False
            task = self._left.popleft()
        task.run(function)
        return True

    def finish(self, task: _Task[Item, Result]) -> None:
        """Until the task is done, do what nobody has begun; then wait for it."""
        while not task.is_done:
            if not self._run_one():
                with self._changed:
                    self._changed.wait_for(lambda: task.is_done)

    def stop(self) -> None:
        """Begin nothing more, and wait for what helpers have begun."""
        if self._process != os.getpid():
            return  # after a fork, where the parent's helpers will never be done
        with self._changed:
            self._left.clear()
            self._function = None
            self._changed.wait_for(lambda: not self._busy)


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
    waiting: deque[_Task[Item, Result]] = deque()
    try:
        for item in islice(source, 2 * threads):
            waiting.append(run.add(item))
        while waiting:
            task = waiting.popleft()
            run.finish(task)
            result = task.result()
            for item in islice(source, 1):
                waiting.append(run.add(item))
            yield result
            del result, task
    finally:
        run.stop()
        for task in waiting:
            task.forget()
