"""Which replica is asked next, on a clock that the test moves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from client_fakes import beat_of

from stitch.client.fleet import LONGEST_ASIDE_S, Fleet, Member
from stitch.records import Heartbeat
from stitch.types import VersionConstraint

ANY = VersionConstraint()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A fleet of three replicas whose hearts beat when told to."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.fleet = Fleet(stale_after_s=10.0, clock=self.clock, dice=random.Random(7))
        self.beats = {name: beat_of(name, f"http://{name}") for name in "abc"}
        self.beat()
        self.beat()

    def beat(self, *, still: str = "", after_s: float = 1.0) -> list[str]:
        self.clock.now += after_s
        for name, beat in self.beats.items():
            if name not in still:
                self.beats[name] = replace(beat, seq=beat.seq + 1)
        return self.fleet.observe(self.beats.values())

    def change(self, name: str, **changes: object) -> Heartbeat:
        self.beats[name] = replace(self.beats[name], **changes)
        return self.beats[name]

    def member(self, name: str) -> Member:
        return next(m for m in self.fleet.members if m.id == name)

    def chosen(self, constraint: VersionConstraint = ANY, exclude: str = "") -> set[str]:
        picks = [self.fleet.choose(constraint, exclude) for _ in range(60)]
        return {pick.id for pick in picks if pick is not None}

    def fail(self, name: str) -> None:
        """One attempt that begins now and fails at once."""
        started_s = self.clock.now
        self.clock.now += 0.001
        self.fleet.failed(self.member(name), started_s)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_all_good_replicas_share_the_work(scene: Scene) -> None:
    assert scene.chosen() == {"a", "b", "c"}


def test_the_less_loaded_of_two_is_picked(scene: Scene) -> None:
    scene.member("a").outstanding = 9
    assert scene.chosen() == {"b", "c"}


def test_nobody_is_left_when_all_are_excluded(scene: Scene) -> None:
    assert scene.fleet.choose(ANY, "abc") is None
    assert scene.chosen(exclude="ab") == {"c"}


def test_a_heartbeat_that_stands_still_loses_its_replica_once(scene: Scene) -> None:
    assert scene.beat(still="a", after_s=9.0) == []
    assert scene.beat(still="a", after_s=2.0) == ["a"]
    assert scene.beat(still="a") == []
    assert scene.chosen() == {"b", "c"}
    assert scene.chosen(exclude="bc") == {"a"}
    scene.beat()
    assert scene.chosen() == {"a", "b", "c"}


@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 3600.0])
def test_other_hosts_clocks_do_not_matter(scene: Scene, skew_s: float) -> None:
    scene.change("a", sent_unix_s=1e9 + skew_s)
    scene.beat()
    assert scene.chosen() == {"a", "b", "c"}


def test_a_time_without_readings_loses_nobody(scene: Scene) -> None:
    scene.clock.now += 3600
    assert scene.beat() == []


def test_a_heartbeat_never_seen_to_change_is_asked_last(scene: Scene) -> None:
    scene.beats["dead"] = beat_of("dead", "http://dead")
    scene.beat(still="dead")
    assert "dead" not in scene.chosen()


def test_a_replica_that_is_not_ready_is_asked_only_when_no_other_is_left(scene: Scene) -> None:
    scene.change("a", ready=False)
    scene.beat()
    assert scene.chosen() == {"b", "c"}
    assert scene.chosen(exclude="bc") == {"a"}


def test_constraints_prefer_who_meets_them(scene: Scene) -> None:
    scene.change("a", applied=7)
    scene.change("b", applied=8)
    scene.change("c", applied=None)
    scene.beat()
    assert scene.chosen(VersionConstraint(min_version=7)) == {"a", "b"}
    assert scene.chosen(VersionConstraint(exact_version=7)) == {"a"}
    assert scene.chosen(VersionConstraint(min_version=9)) == {"a", "b", "c"}


def test_a_version_seen_in_an_answer_counts_until_heartbeats_catch_up(scene: Scene) -> None:
    scene.fleet.succeeded(scene.member("a"), 9)
    assert scene.member("a").applied == 9
    scene.beat()
    assert scene.member("a").applied == 9
    scene.beat()
    assert scene.member("a").applied == 5


def test_a_restart_forgets_what_was_learned(scene: Scene) -> None:
    scene.fleet.succeeded(scene.member("a"), 9)
    scene.change("a", boot="boot-2", applied=0)
    scene.beat()
    assert scene.member("a").applied == 0


def test_a_failing_replica_is_put_aside_longer_each_time_up_to_a_limit(scene: Scene) -> None:
    spans = []
    for _ in range(12):
        scene.fail("a")
        spans.append(scene.member("a").aside_until_s - scene.clock.now)
        scene.clock.now += spans[-1] + 1
    assert spans[0] < 1
    assert spans[4] > 4 * spans[0]
    assert spans[-1] <= 1.25 * LONGEST_ASIDE_S
    scene.fail("a")
    assert scene.chosen() == {"b", "c"}
    assert scene.chosen(exclude="bc") == {"a"}


def test_attempts_that_fail_together_count_as_one_failure(scene: Scene) -> None:
    started_s = scene.clock.now
    scene.clock.now += 1
    for _ in range(100):
        scene.fleet.failed(scene.member("a"), started_s)
    assert scene.member("a").penalty == 1


def test_a_flapping_replica_stays_suspect_between_its_successes(scene: Scene) -> None:
    for _ in range(6):
        scene.fail("a")
        scene.fleet.succeeded(scene.member("a"), None)
        scene.clock.now += 60
    before_s = scene.clock.now
    scene.fail("a")
    assert scene.member("a").aside_until_s - before_s > 0.6
    for _ in range(8):
        scene.fleet.succeeded(scene.member("a"), None)
    assert scene.member("a").penalty < 0.01


def test_one_slow_answer_puts_nobody_aside_but_two_in_a_row_do(scene: Scene) -> None:
    def time_out() -> None:
        scene.clock.now += 1
        started_s = scene.clock.now
        scene.clock.now += 5
        for _ in range(10):
            scene.fleet.timed_out(scene.member("a"), started_s)

    time_out()
    assert scene.chosen() == {"a", "b", "c"}
    scene.fleet.succeeded(scene.member("a"), 5)
    time_out()
    assert scene.chosen() == {"a", "b", "c"}
    time_out()
    assert scene.chosen() == {"b", "c"}


def test_all_past_needs_every_living_replica_beyond_the_exact_version(scene: Scene) -> None:
    assert scene.fleet.all_past(VersionConstraint(exact_version=4))
    assert not scene.fleet.all_past(VersionConstraint(exact_version=5))
    assert not scene.fleet.all_past(VersionConstraint(min_version=4))
    scene.change("a", applied=3)
    scene.beat()
    assert not scene.fleet.all_past(VersionConstraint(exact_version=4))


def test_replicas_that_leave_the_board_are_forgotten(scene: Scene) -> None:
    del scene.beats["a"]
    scene.beat()
    assert scene.chosen() == {"b", "c"}
