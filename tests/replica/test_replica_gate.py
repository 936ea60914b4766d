"""Admission, and the numbers it is seen by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from replica_kit import until

from stitch.replica.gate import Gate, NotAdmittedError
from stitch.replica.metrics import Counter, Gauge, Histogram, Registry, StateGauge
from stitch.replica.state import ReplicaStatus
from stitch.types import NotReadyReason, ReplicaState, VersionConstraint, VersionRef

AT_LEAST = VersionConstraint(min_version=6)


def serving(version: int) -> ReplicaStatus:
    status = ReplicaStatus(replica="one", run="r", applied=version, newest=version)
    status.caught_up = True
    status.move(ReplicaState.SERVING)
    return status


def nothing() -> None:
    return None


async def test_waiters_are_let_in_together_on_the_new_version() -> None:
    status = serving(5)
    gate = Gate(status, nothing)
    async with gate.closed():
        waiting = [asyncio.create_task(gate.admit(AT_LEAST)) for _ in range(20)]
        await until(lambda: gate.num_waiting == 20)
        status.applied = 6
    assert await asyncio.gather(*waiting) == [VersionRef("r", 6)] * 20
    assert gate.num_waiting == 0


async def test_the_gate_opens_however_the_commit_ends() -> None:
    gate = Gate(serving(5), nothing)
    with pytest.raises(ZeroDivisionError):
        async with gate.closed():
            raise ZeroDivisionError
    assert await gate.admit(VersionConstraint()) == VersionRef("r", 5)


async def test_a_commit_right_after_another_keeps_waiters_waiting() -> None:
    gate = Gate(serving(5), nothing)
    async with gate.closed():
        waiting = asyncio.create_task(gate.admit(VersionConstraint()))
        await asyncio.sleep(0)
    async with gate.closed():
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting == VersionRef("r", 5)


async def test_only_requests_that_wait_for_something_wake_the_reconciler() -> None:
    woken: list[bool] = []
    gate = Gate(serving(5), lambda: woken.append(True))
    refusals: list[tuple[VersionConstraint, NotReadyReason, int]] = [
        (VersionConstraint(exact_version=4), NotReadyReason.AHEAD, 0),
        (VersionConstraint(exact_version=6), NotReadyReason.BEHIND, 1),
        (AT_LEAST, NotReadyReason.BEHIND, 2),
    ]
    for constraint, reason, times in refusals:
        with pytest.raises(NotAdmittedError) as refused:
            await gate.admit(constraint)
        assert refused.value.reason is reason
        assert len(woken) == times


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: None, ""),
        (lambda s: s.move(ReplicaState.FETCHING, "fetching"), ""),
        (lambda s: s.move(ReplicaState.ERROR, "version 6: bad"), ""),
        (lambda s: setattr(s, "newest", 7), ""),
        (lambda s: setattr(s, "newest", 8), "3 versions behind: catching up"),
        (lambda s: setattr(s, "caught_up", False), "serving"),
        (lambda s: s.move(ReplicaState.VERIFYING, "loading"), "loading"),
        (lambda s: s.move(ReplicaState.FAILED), "failed"),
        (lambda s: setattr(s, "engine_down_since_s", 0.0), "the engine has not answered"),
    ],
)
def test_readiness_has_a_reason(change: Callable[[ReplicaStatus], None], reason: str) -> None:
    status = serving(5)
    status.max_lag = 2
    change(status)
    assert status.ready is (reason == "")
    assert status.reason.startswith(reason)


def test_metrics_are_written_in_prometheus_text() -> None:
    counter = Counter("c_total", "Counts.", ("what",))
    counter.add(2, 'a"b\\c\n')
    histogram = Histogram("h_seconds", "Times.", (0.1, 1.0))
    for value in (0.1, 0.5, 7.0):
        histogram.observe(value)
    registry = Registry()
    registry.add(
        counter,
        Counter("n_total", "None yet."),
        Gauge("g", "A value.", lambda: 1.5),
        Gauge("absent", "Not known.", lambda: None),
        StateGauge("s", "State.", "state", ["a", "b"], lambda: "b"),
        histogram,
    )
    assert registry.text() == (
        "# HELP c_total Counts.\n# TYPE c_total counter\n"
        'c_total{what="a\\"b\\\\c\\n"} 2\n'
        "# HELP n_total None yet.\n# TYPE n_total counter\nn_total 0\n"
        "# HELP g A value.\n# TYPE g gauge\ng 1.5\n"
        "# HELP absent Not known.\n# TYPE absent gauge\n"
        '# HELP s State.\n# TYPE s gauge\ns{state="a"} 0\ns{state="b"} 1\n'
        "# HELP h_seconds Times.\n# TYPE h_seconds histogram\n"
        'h_seconds_bucket{le="0.1"} 1\nh_seconds_bucket{le="1"} 2\nh_seconds_bucket{le="+Inf"} 3\n'
        "h_seconds_sum 7.5999999999999996\nh_seconds_count 3\n"
    )
