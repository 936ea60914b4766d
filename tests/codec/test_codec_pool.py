"""Work in threads: results in order, bounded, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from stitch.codec.pool import MAX_DEFAULT_THREADS, ordered

WAIT_S = 30


class Meter:
    """How many calls have begun, and how many run; the first `together` wait for each other."""

    def __init__(self, together: int = 1) -> None:
        self._lock = threading.Lock()
        self._together, self._barrier = together, threading.Barrier(together)
        self.running = self.most = self.begun = 0

    def __enter__(self) -> None:
        with self._lock:
            self.running += 1
            self.begun += 1
            self.most = max(self.most, self.running)
            waits = self.begun <= self._together
        if waits:
            self._barrier.wait(WAIT_S)

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self.running -= 1


def check_left_alone(meter: Meter) -> None:
    """Nothing runs, nor is there anything that a thread might still begin."""
    assert meter.running == 0
    begun, everybody = meter.begun, threading.Barrier(MAX_DEFAULT_THREADS)
    # Whoever has been asked before comes before those who are asked now.
    assert list(ordered(lambda _: everybody.wait(WAIT_S) < 99, range(8), 8)) == [True] * 8
    assert (meter.running, meter.begun) == (0, begun)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_results_come_in_order_from_so_many_threads(threads: int) -> None:
    meter = Meter(together=threads)

    def work(item: int) -> int:
        with meter:
            return item * item

    assert list(ordered(work, range(40), threads)) == [item * item for item in range(40)]
    assert (meter.begun, meter.running, meter.most) == (40, 0, threads)


def test_more_threads_than_there_are_do_the_same() -> None:
    assert list(ordered(abs, range(-200, 0), 50)) == list(range(200, 0, -1))


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
    meter = Meter(together=3)

    def work(item: int) -> int:
        with meter:
            if item in (5, 6):
                raise OSError(f"item {item}")
            return item

    results = ordered(work, range(1000), 3)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="item 5"):
        next(results)
    assert meter.begun <= 5 + 2 * 3
    check_left_alone(meter)


def test_closing_waits_for_what_runs_and_begins_nothing_more() -> None:
    meter = Meter(together=3)

    def work(item: int) -> int:
        with meter:
            return item

    results = ordered(work, range(1000), 3)
    assert next(iter(results)) == 0
    results.close()  # type: ignore[attr-defined]
    assert meter.begun <= 6
    check_left_alone(meter)


@pytest.mark.parametrize("count", [0, 1, 5, 10])
def test_an_error_of_the_items_is_raised_and_nothing_is_left_running(count: int) -> None:
    """Raised before a result was taken, while others run, or later."""
    meter = Meter()
    begun, raising = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield from range(count)
        assert count == 0 or begun.wait(WAIT_S)
        raising.set()
        raise OSError("no more")

    def work(item: int) -> int:
        with meter:
            begun.set()
            assert count > 5 or raising.wait(WAIT_S)
            return item

    with pytest.raises(OSError, match="no more"):
        list(ordered(work, items(), 3))
    check_left_alone(meter)


def test_an_interrupt_of_the_caller_comes_out_at_once() -> None:
    """Not in the place of the item it was at, after whatever the earlier ones come to."""
    caller = threading.get_ident()
    meter = Meter()
    begun, interrupted = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 0
        assert begun.wait(WAIT_S)  # by another thread, as the caller is here
        yield from range(1, 100)

    def work(item: int) -> int:
        with meter:
            if threading.get_ident() == caller:
                interrupted.set()
                raise KeyboardInterrupt
            begun.set()
            assert interrupted.wait(WAIT_S)
            raise OSError("of another thread")

    with pytest.raises(KeyboardInterrupt):
        list(ordered(work, items(), 2))
    assert meter.begun <= 4
    check_left_alone(meter)


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
            check_left_alone(Meter())  # those who were asked too late have come and gone
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
from stitch.codec.pool import MAX_DEFAULT_THREADS, ordered

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
from stitch.codec.pool import MAX_DEFAULT_THREADS, ordered

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
