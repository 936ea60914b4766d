"""Heartbeats gathered over the life of several processes."""

from __future__ import annotations

from typing import Any

from stitch.demo.watch import FleetWatch
from stitch.records import Heartbeat
from stitch.types import ReplicaState


def beat(boot: str, applied: int | None, sent_s: float, *commits: int, ready: bool = True) -> Any:
    return Heartbeat(
        replica="r2",
        run="demo",
        url="http://127.0.0.1:1",
        region="",
        state=ReplicaState.SERVING,
        applied=applied,
        newest_seen=applied,
        ready=ready,
        reason="",
        last_error="",
        boot=boot,
        seq=1,
        sent_unix_s=sent_s,
        versions=tuple(
            {
                "version": version,
                "stage_s": 0.5,
                "pause_ms": 2.0,
                "published_unix_s": 100.0 * version,
                "served_unix_s": 100.0 * version + 3,
            }
            for version in commits
        ),
    )


class ScriptedRun:
    """A run on which one heartbeat after the other is found."""

    def __init__(self, *beats: Heartbeat) -> None:
        self._beats = list(beats)

    def heartbeats(self) -> list[Heartbeat]:
        return [self._beats.pop(0)]


def watched(*beats: Heartbeat) -> FleetWatch:
    watch = FleetWatch(ScriptedRun(*beats))  # type: ignore[arg-type]
    for _ in beats:
        watch.look()
    return watch


def test_commits_of_an_earlier_life_are_kept_and_none_is_counted_twice() -> None:
    watch = watched(beat("a", 1, 50, 1), beat("a", 2, 60, 1, 2), beat("b", 4, 500, 4))
    assert [(c.version, c.stage_ms, c.publish_to_served_s) for c in watch.commits()] == [
        (1, 500.0, 3.0),
        (2, 500.0, 3.0),
        (4, 500.0, 3.0),
    ]


def test_what_was_published_before_a_replica_was_ready_is_catching_up() -> None:
    watch = watched(beat("a", None, 50, ready=False), beat("a", 2, 150, 1), beat("a", 2, 250, 1, 2))
    assert [c.caught_up for c in watch.commits()] == [False, True]


def test_a_dead_process_is_not_ready_however_good_its_last_heartbeat() -> None:
    watch = watched(beat("a", 4, 500))
    assert watch.ready_at("r2", 4)
    assert not watch.ready_at("r2", 5)
    assert not watch.ready_at("r2", 4, other_than_boot="a")
    assert not watch.ready_at("r9", 0)
