"""Work in threads: results in order, bounded, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from stitch.codec.pool import ordered


class Meter:
    """How many calls run at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.running = self.most = self.begun = 0

    def __enter__(self) -> None:
        with self._lock:
            self.running += 1
            self.begun += 1
            self.most = max(self.most, self.running)

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self.running -= 1


@pytest.mark.parametrize("threads", [1, 2, 3, 12])
def test_results_come_in_order_from_so_many_threads(threads: int) -> None:
    meter = Meter()

    def work(item: int) -> int:
        with meter:
            time.sleep(0.002 * (item % 3))
            return item * item

    assert list(ordered(work, range(40), threads)) == [item * item for item in range(40)]
    assert meter.begun == 40
    assert meter.running == 0
    assert meter.most <= threads
    if threads > 1:
        assert meter.most > 1


def test_no_more_than_twice_the_threads_are_ahead_of_whoever_takes_the_results() -> None:
    taken = 0
    ahead = []

    def items() -> Iterator[int]:
        for item in range(50):
            ahead.append(item - taken)
            yield item

    for _ in ordered(lambda item: item, items(), 3):
        taken += 1
    assert max(ahead) <= 6


def test_the_first_error_comes_in_its_place_and_nothing_is_begun_after_it() -> None:
    meter = Meter()

    def work(item: int) -> int:
        with meter:
            time.sleep(0.005)
            if item in (5, 6):
                raise OSError(f"item {item}")
            return item

    results = ordered(work, range(1000), 3)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="item 5"):
        next(results)
    assert meter.running == 0
    begun = meter.begun
    assert begun <= 5 + 2 * 3
    time.sleep(0.05)
    assert meter.begun == begun


def test_closing_waits_for_what_runs_and_begins_nothing_more() -> None:
    meter = Meter()

    def work(item: int) -> int:
        with meter:
            time.sleep(0.01)
            return item

    results = ordered(work, range(1000), 3)
    assert next(iter(results)) == 0
    results.close()  # type: ignore[attr-defined]
    assert meter.running == 0
    begun = meter.begun
    time.sleep(0.05)
    assert meter.begun == begun <= 6


@pytest.mark.parametrize("count", [0, 1, 5, 10])
def test_an_error_of_the_items_is_raised_and_nothing_is_left_running(count: int) -> None:
    meter = Meter()

    def items() -> Iterator[int]:
        yield from range(count)
        time.sleep(0.005)
        raise OSError("no more")

    def work(item: int) -> int:
        with meter:
            time.sleep(0.02)
            return item

    with pytest.raises(OSError, match="no more"):
        list(ordered(work, items(), 3))
    assert meter.running == 0
    begun = meter.begun
    time.sleep(0.05)
    assert meter.begun == begun


def test_an_interrupt_of_the_caller_comes_out_at_once() -> None:
    caller = threading.get_ident()
    meter = Meter()

    def work(item: int) -> int:
        with meter:
            if item == 0:
                time.sleep(0.1)
                raise OSError("an error of the first item, in whichever thread")
            if threading.get_ident() == caller:
                raise KeyboardInterrupt
            time.sleep(0.01)
            return item

    # The caller is given the first item, or, where a helper was faster, interrupted in another.
    with pytest.raises((KeyboardInterrupt, OSError)):
        list(ordered(work, range(100), 3))
    assert meter.running == 0
    assert meter.begun < 40

    def only_interrupts(item: int) -> int:
        if threading.get_ident() == caller:
            raise KeyboardInterrupt
        time.sleep(0.05)
        return item

    with pytest.raises(KeyboardInterrupt):
        list(ordered(only_interrupts, range(100), 2))


def test_what_the_function_holds_is_let_go_at_the_end() -> None:
    class Large:
        pass

    def run(fails: bool) -> weakref.ref[Large]:
        large = Large()

        def work(item: int) -> int:
            if fails and item > 2:
                raise OSError(f"{large} {item}")
            return item

        with contextlib.suppress(OSError):
            list(ordered(work, range(20), 3))
        return weakref.ref(large)

    gc.disable()
    try:
        for fails in (False, True):
            held = run(fails)
            for _ in range(100):
                if held() is None:
                    break
                time.sleep(0.01)  # until a helper that was asked has come and gone
            assert held() is None, fails
    finally:
        gc.enable()


def test_work_inside_work_ends_even_where_all_helpers_are_taken() -> None:
    def outer(item: int) -> int:
        return sum(ordered(lambda inner: inner + item, range(10), 8))

    totals: list[list[int]] = []
    callers = [
        threading.Thread(target=lambda: totals.append(list(ordered(outer, range(30), 8))))
        for _ in range(6)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert totals == [[45 + 10 * item for item in range(30)]] * 6


def test_a_result_is_let_go_once_it_was_given_out() -> None:
    alive = 0
    most = 0

    class Result:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    for _ in ordered(lambda item: Result(), range(60), 2):
        pass
    del _
    assert most <= 5
    assert alive == 0


_FORKING = """
import os, sys, threading
from stitch.codec.pool import ordered

def work(item):
    seen.add(threading.get_ident())
    barrier.wait(30)
    return item

def both():
    global seen, barrier
    seen, barrier = set(), threading.Barrier(2)
    assert list(ordered(work, range(8), 2)) == list(range(8))
    assert len(seen) == 2, seen

both()
child = os.fork()
if not child:
    both()
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
both()

begun, go_on = threading.Event(), threading.Event()
caller = threading.get_ident()

def slow(item):
    if threading.get_ident() != caller:
        begun.set()
        assert go_on.wait(30)
    return item

results = ordered(slow, range(4), 2)
assert next(results) == 0 and begun.wait(30)
child = os.fork()
if not child:
    results.close()
    os._exit(8)
go_on.set()
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 8, status
assert list(results) == [1, 2, 3]
"""

_ENDING = """
import atexit, threading
from stitch.codec.pool import ordered

def late():
    assert list(ordered(lambda item: item + 1, range(9), 3)) == list(range(1, 10))
    print("late", flush=True)

atexit.register(late)
threading._register_atexit(late)
list(ordered(lambda item: item, range(9), 3))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_helpers_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", _FORKING], check=True, timeout=60)


def test_an_ending_interpreter_still_gets_its_work_done() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _ENDING], check=True, timeout=60, capture_output=True, text=True
    )
    assert run.stdout == "late\nlate\n", run.stderr
