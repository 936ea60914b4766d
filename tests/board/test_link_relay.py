"""The line of the link benchmark: its rate, its delay, its buffer."""

from __future__ import annotations

import pytest

from benchmarks._link_relay import QUEUE_S, Lane
from benchmarks._link_steps import versions

RATE = 1000.0


def arrivals(lane: Lane, until_s: float, step_s: float = 0.001) -> list[tuple[float, bytes]]:
    """(time, packet) of all that arrives, looked for every `step_s`."""
    found = []
    for tick in range(round(until_s / step_s) + 1):
        while (packet := lane.due(tick * step_s)) is not None:
            found.append((tick * step_s, packet))
    return found


def test_packets_take_their_length_and_the_delay_one_after_the_other() -> None:
    lane = Lane(RATE, 0.5)
    for packet in (b"a" * 50, b"b" * 30):
        lane.take(packet, 0.0)
    lane.take(b"c" * 10, 0.3)  # the line has been free for a while
    assert lane.next_s == pytest.approx(0.55)
    found = arrivals(lane, 1.0)
    assert [packet[:1] for _, packet in found] == [b"a", b"b", b"c"]
    assert [at for at, _ in found] == pytest.approx([0.55, 0.58, 0.81], abs=0.002)
    assert lane.next_s is None


def test_what_finds_the_buffer_full_is_dropped() -> None:
    lane = Lane(RATE, 0.0)
    for _ in range(20):
        lane.take(b"x" * 10, 0.0)
    accepted = lane.num_bytes // 10
    assert accepted == pytest.approx(QUEUE_S * RATE / 10, abs=1)
    assert lane.num_dropped == 20 - accepted
    lane.take(b"y" * 10, 0.05)  # some of it has gone
    assert lane.num_dropped == 20 - accepted


def test_simulated_versions_start_from_their_base_and_differ() -> None:
    _, steps = versions(None, 20_000)
    first, second, third = next(steps), next(steps), next(steps)
    same = [
        all((a.words_at(i) == b.words_at(i)).all() for i in range(len(a.schema)))
        for a, b in ((first, second), (second, third))
    ]
    assert same == [False, False]
