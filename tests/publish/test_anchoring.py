"""Anchors and merged patches beside publishing: when they are due, and that nothing waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from stitch.board import Board, Run
from stitch.errors import StoreFullError
from stitch.mirror import Mirror
from stitch.publish import Publisher
from stitch.publish import anchoring as anchoring_module
from stitch.publish import merging as merging_module
from stitch.publish.anchoring import AnchorRule
from stitch.publish.compact import Compactor
from stitch.publish.merging import BackgroundMerging
from stitch.records import AnchorRecord
from stitch.tensors import HostWeights, WeightReader, write_safetensors
from stitch.testing.faults import FaultyStore
from stitch.testing.published import IMPATIENT, NO_RETRIES, copy_of, digest_of, quick_board
from stitch.testing.synthetic import adam_step, synthetic_schema, synthetic_weights

DEADLINE_S = 60.0
WIDE = 0.5
"""Changes so many elements that a few patches take as many bytes as the view."""


class World:
    """A publisher's weights, and what each version held."""

    def __init__(self, root: Path, board: Board | None = None, **options: object) -> None:
        self.board = board or quick_board(root / "board")
        self.weights = synthetic_weights(synthetic_schema(hidden=32))
        self.digests = [digest_of(self.weights)]
        self.base = root / "base.safetensors"
        write_safetensors(self.base, self.weights)
        self.options = {"retry": NO_RETRIES, "threads": 1, "scratch": root / "scratch"} | options
        self.publisher = Publisher.start(self.board, "r", self.base, **self.options)

    @property
    def run(self) -> Run:
        return self.publisher.run

    def publish(self, density: float = WIDE) -> None:
        adam_step(self.weights, density, seed=len(self.digests))
        self.publisher.publish(self.weights).wait(DEADLINE_S)
        self.digests.append(digest_of(self.weights))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    with made.publisher:
        yield made


def chain_bytes(run: Run, first: int, last: int) -> int:
    return sum(run.manifest(version).num_bytes for version in range(first, last + 1))


def test_an_anchor_is_written_where_the_patches_cost_more_than_the_whole(world: World) -> None:
    while not world.run.anchors():
        world.publish()
        world.publisher.flush(DEADLINE_S)
        assert world.run.newest() < 20
    (anchored,) = world.run.anchors()
    whole = world.run.record.num_bytes
    assert chain_bytes(world.run, 1, anchored) > whole >= chain_bytes(world.run, 1, anchored - 1)
    while len(world.run.anchors()) == 1:
        world.publish()
        world.publisher.flush(DEADLINE_S)
        assert world.run.newest() < 20
    second = world.run.anchors()[1]
    assert chain_bytes(world.run, anchored + 1, second) > whole
    assert chain_bytes(world.run, anchored + 1, second - 1) <= whole
    for version in world.run.anchors():
        record = world.run.anchor(version)
        assert record is not None
        assert Mirror.from_anchor(world.run, record).digest == world.digests[version]


def test_small_patches_ask_the_board_for_nothing(tmp_path: Path) -> None:
    store = FaultyStore(quick_board(tmp_path / "board").store)
    world = World(tmp_path, Board(store, patience=IMPATIENT))
    with world.publisher:
        world.publish(0.001)
        world.publisher.flush(DEADLINE_S)
        counts = []
        for _ in range(4):
            store.forget_requests()
            world.publish(0.001)
            world.publisher.flush(DEADLINE_S)
            counts.append(store.num_requests)
        assert len(set(counts)) == 1
        assert store.counts["list"] == 0


def test_a_resumed_publisher_counts_what_was_published_before(world: World) -> None:
    rule = AnchorRule(world.run, "auto")
    world.publish()
    num_bytes = world.run.manifest(1).num_bytes
    assert not rule.is_due(1, num_bytes)
    while chain_bytes(world.run, 1, world.run.newest()) <= world.run.record.num_bytes:
        world.publish()
    world.publisher.flush(DEADLINE_S)
    (anchored,) = world.run.anchors()
    assert not AnchorRule(world.run, "auto").is_due(anchored, num_bytes)
    world.run.board.store.delete(f"r/v/{anchored:08d}/anchor.json")
    assert AnchorRule(world.run, "auto").is_due(anchored, num_bytes)


def test_merged_patches_put_an_anchor_off(tmp_path: Path) -> None:
    world = World(tmp_path, anchor_every=None)
    with world.publisher:
        while chain_bytes(world.run, 1, world.run.newest()) <= world.run.record.num_bytes:
            world.publish()
        while world.run.newest() % 4:
            world.publish(0.001)
    newest = world.run.newest()
    assert AnchorRule(world.run, "auto").is_due(newest, 1)
    Compactor(world.run, threads=1).compact()
    assert not AnchorRule(world.run, "auto").is_due(newest, 1)


def test_a_failed_anchor_is_not_tried_after_every_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore(quick_board(tmp_path / "board").store)
    store.fail("anchor-", times=None, error=StoreFullError("the store is full (planned fault)"))
    world = World(tmp_path, Board(store, patience=IMPATIENT))
    with world.publisher, caplog.at_level(logging.WARNING, "stitch"):
        while not any("anchor_failed" in r.getMessage() for r in caplog.records):
            world.publish()
            world.publisher.flush(DEADLINE_S)
        for _ in range(3):
            world.publish(0.001)
            world.publisher.flush(DEADLINE_S)
        assert sum("anchor_failed" in r.getMessage() for r in caplog.records) == 1
        store.heal()
        world.publish()
        world.publisher.flush(DEADLINE_S)
        assert world.run.anchors() == [world.run.newest()]


class Slow:
    """Holds `write_anchor` back until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.digest = ""
        self._real = anchoring_module.write_anchor
        monkeypatch.setattr(anchoring_module, "write_anchor", self._write)

    def _write(self, run: Run, reader: WeightReader, version: int, **options: object) -> object:
        self.entered.set()
        assert self.go_on.wait(DEADLINE_S)
        record: AnchorRecord = self._real(run, reader, version, **options)  # type: ignore[arg-type]
        return record


@pytest.mark.parametrize("when_busy", ["block", "coalesce"])
def test_publishing_goes_on_while_an_anchor_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_busy: str
) -> None:
    slow = Slow(monkeypatch)
    world = World(tmp_path, anchor_every=2, when_busy=when_busy)
    with world.publisher as publisher:
        world.publish()
        world.publish()
        assert slow.entered.wait(DEADLINE_S)
        for _ in range(4):  # buffers go round more than once
            world.publish()
        with pytest.raises(TimeoutError, match="an anchor of run 'r'"):
            publisher.flush(0.01)
        slow.go_on.set()
        publisher.flush(DEADLINE_S)
        assert world.run.anchors() == [2]
        record = world.run.anchor(2)
        assert record is not None
        assert Mirror.from_anchor(world.run, record).digest == world.digests[2]
        world.publish()
    assert world.run.anchors() == [2]
    assert world.run.newest() == 7
    mirror = Mirror.load(synthetic_weights(synthetic_schema(hidden=32)))
    mirror.identify(world.run)
    mirror.advance(world.run)
    assert mirror.digest == world.digests[7]


def test_buffers_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    made: list[HostWeights] = []
    real = HostWeights.allocate.__func__  # type: ignore[attr-defined]

    def allocate(cls: type[HostWeights], schema: object) -> HostWeights:
        made.append(real(cls, schema))
        return made[-1]

    world = World(tmp_path, anchor_every=1, when_busy="block")
    monkeypatch.setattr(HostWeights, "allocate", classmethod(allocate))
    with world.publisher as publisher:
        for _ in range(3):
            slow.entered.clear()
            slow.go_on.clear()
            world.publish()
            assert slow.entered.wait(DEADLINE_S)
            world.publish()
            world.publish()
            slow.go_on.set()
            publisher.flush(DEADLINE_S)
        # At most one more for each anchor that publishing overlapped with.
        assert len(made) <= 6


def test_a_commit_in_doubt_waits_for_the_anchor_that_reads_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    store = FaultyStore(quick_board(tmp_path / "board").store)
    world = World(tmp_path, Board(store, patience=IMPATIENT), anchor_every=1)
    with world.publisher as publisher:
        world.publish()
        assert slow.entered.wait(DEADLINE_S)
        store.lose_reply("v/00000002/manifest.json", times=None)
        store.fail("v/00000002/manifest.json", operations=("get",), times=None)
        adam_step(world.weights, WIDE, seed=50)
        failed = publisher.publish(copy_of(world.weights))
        with pytest.raises(Exception, match="is not known"):
            failed.wait(DEADLINE_S)
        store.heal()
        world.digests.append(digest_of(world.weights))
        adam_step(world.weights, WIDE, seed=51)
        ticket = publisher.publish(world.weights)
        with pytest.raises(TimeoutError):
            ticket.wait(0.05)
        slow.go_on.set()
        assert ticket.wait(DEADLINE_S).version == 3
        publisher.flush(DEADLINE_S)
        record = world.run.anchor(1)
        assert record is not None
        assert Mirror.from_anchor(world.run, record).digest == world.digests[1]


def test_a_publisher_that_merges_writes_merged_patches_beside_publishing(tmp_path: Path) -> None:
    from stitch.board import spans

    world = World(tmp_path, merge=True)
    wanted = sorted(spans.spans(9))
    with world.publisher:
        for _ in range(9):
            world.publish(0.01)
        merging = world.publisher._merging
        assert merging is not None
        poll = threading.Event()
        for _ in range(int(DEADLINE_S / 0.01)):
            if world.run.merged_spans() == wanted:
                break
            poll.wait(0.01)
    assert world.run.merged_spans() == wanted
    assert not merging._thread.is_alive()


def test_merging_that_is_closed_before_it_begins_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[threading.Event] = []

    class ClosedMeanwhile(threading.Event):
        """As if `close` were called just before anything is cleared."""

        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def clear(self) -> None:
            for event in made:
                event.set()
            super().clear()

    world = World(tmp_path)
    monkeypatch.setattr(
        merging_module,
        "threading",
        SimpleNamespace(Event=ClosedMeanwhile, Thread=threading.Thread),
    )
    with world.publisher:
        merging = BackgroundMerging(world.run, encoding="auto", decode="any", scratch=None)
        merging._thread.join(DEADLINE_S)
        assert not merging._thread.is_alive()


def test_closing_waits_for_merging_no_longer_than_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def compact(*_: object) -> None:
        entered.set()
        assert go_on.wait(DEADLINE_S)

    monkeypatch.setattr(Compactor, "compact", compact)
    world = World(tmp_path, merge=True)
    try:
        assert entered.wait(DEADLINE_S)
        with pytest.raises(TimeoutError, match="merging of patches of run 'r'"):
            world.publisher.close(0.05)
    finally:
        go_on.set()
        world.publisher.close(DEADLINE_S)
    with Publisher.resume(world.board, "r", world.base, threads=1) as publisher:
        assert publisher.ref.version == 0  # the end was noted after all: nothing to fence off


def test_merging_that_fails_fails_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise MemoryError("no room for a mirror")

    monkeypatch.setattr(Compactor, "compact", fail)
    with caplog.at_level(logging.WARNING, "stitch"):
        world = World(tmp_path, merge=True)
        with world.publisher:
            world.publish(0.01)
            assert failed.wait(DEADLINE_S)
    assert world.run.newest() == 1
    assert any("event=merging_failed" in r.getMessage() for r in caplog.records)
