"""A publisher and a store that fails: old or new, never a guess, never a lost version."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from publish_helpers import DEADLINE_S, Gate, TinyModel, read_version, view_of, write_base

from stitch.board import Board
from stitch.errors import (
    PublishConflictError,
    PublisherClosedError,
    StaleEpochError,
    StoreError,
    StoreFullError,
)
from stitch.publish import Publisher, RetryPolicy
from stitch.testing.faults import FaultyStore
from stitch.testing.published import FEW_RETRIES, IMPATIENT, NO_RETRIES, digest_of, quick_board
from stitch.types import VersionRef


class World:
    """One model, one board behind a faulty store, one publisher."""

    def __init__(self, directory: Path, retry: RetryPolicy = NO_RETRIES) -> None:
        self.model = TinyModel()
        self.base = write_base(directory / "base.safetensors", self.model)
        self.clean = quick_board(directory / "board")
        self.store = FaultyStore(self.clean.store)
        self.publisher = Publisher.start(
            Board(self.store, patience=IMPATIENT), "r", self.base, retry=retry, threads=1
        )
        self.steps = 0

    def publish(self) -> VersionRef:
        return self.ticket().wait(DEADLINE_S)

    def ticket(self):  # type: ignore[no-untyped-def]
        self.steps += 1
        self.model.train_step(self.steps)
        return self.publisher.publish(self.model, step=self.steps)

    def assert_published(self, version: int) -> None:
        """The board's newest version is `version` and holds the model as it is now."""
        run = self.clean.open_run("r")
        assert run.newest() == version
        wanted = digest_of(view_of(self.model, run.schema))
        assert read_version(run, self.base).digest == wanted


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("place", [".patch", "manifest.json"])
def test_a_full_disk_fails_one_publish_and_the_next_makes_up_for_it(
    world: World, place: str
) -> None:
    world.publish()
    world.store.fill_up(place, times=1)
    with pytest.raises(StoreFullError):
        world.publish()
    assert world.publisher.ref == VersionRef("r", 1)
    assert world.clean.open_run("r").newest() == 1
    assert world.publish() == VersionRef("r", 2)
    world.assert_published(2)
    world.publisher.close()


@pytest.mark.parametrize("place", [".patch", "manifest.json", "epochs/"])
def test_short_outages_are_ridden_out(tmp_path: Path, place: str) -> None:
    world = World(tmp_path, FEW_RETRIES)
    world.store.fail(place, times=2)
    assert world.publish() == VersionRef("r", 1)
    world.assert_published(1)
    world.publisher.close()


def test_a_long_outage_fails_the_publish_but_not_the_publisher(tmp_path: Path) -> None:
    world = World(tmp_path, FEW_RETRIES)
    world.store.fail(times=None)
    with pytest.raises(StoreError):
        world.publish()
    world.store.heal()
    assert world.publish() == VersionRef("r", 1)
    world.assert_published(1)
    world.publisher.close()


@pytest.mark.parametrize("place", [".patch", "manifest.json", "head.json"])
def test_a_lost_reply_is_no_lost_version(world: World, place: str) -> None:
    world.publish()
    world.store.lose_reply(place)
    if place == ".patch":
        with pytest.raises(StoreError):
            world.publish()
        assert world.publish() == VersionRef("r", 2)
    else:
        assert world.publish() == VersionRef("r", 2)
    world.assert_published(2)
    assert world.publish() == VersionRef("r", 3)
    world.assert_published(3)
    world.publisher.close()


def test_a_lost_reply_for_a_blob_is_retried_with_the_same_name(tmp_path: Path) -> None:
    world = World(tmp_path, FEW_RETRIES)
    world.store.lose_reply(".patch")
    assert world.publish() == VersionRef("r", 1)
    world.assert_published(1)
    world.publisher.close()


def test_a_commit_without_any_answer_is_found_again_before_the_next_one(world: World) -> None:
    world.publish()
    world.store.lose_reply("2/manifest.json", times=1)
    world.store.fail("2/manifest.json", times=None)
    with pytest.raises(StoreError, match=r"whether r@2 was published is not known"):
        world.publish()
    assert world.publisher.ref == VersionRef("r", 1)  # not known, so it does not move
    assert world.clean.open_run("r").newest() == 2  # though it was published
    with pytest.raises(StoreError, match="is not known"):
        world.publish()
    world.store.heal()
    assert world.publish() == VersionRef("r", 3)
    world.assert_published(3)
    world.publisher.close()


def test_a_commit_that_never_arrived_is_not_taken_for_one(world: World) -> None:
    world.publish()
    world.store.fail("manifest.json", times=None)
    with pytest.raises(StoreError, match="is not known"):
        world.publish()
    world.store.heal()
    assert world.publish() == VersionRef("r", 2)
    world.assert_published(2)
    world.publisher.close()


def test_another_writers_version_ends_the_publisher(world: World) -> None:
    world.publish()
    rival = Publisher.resume(world.clean, "r", world.base)
    world.store.hide("epochs/", times=None)  # so that only the manifest stands between them
    model = TinyModel()
    assert rival.ref == VersionRef("r", 2)  # the version that fences the first one off
    with pytest.raises(PublishConflictError, match="r@2"):
        world.publish()
    with pytest.raises(PublisherClosedError) as caught:
        world.publisher.publish(world.model)
    assert isinstance(caught.value.__cause__, PublishConflictError)
    assert world.publisher.ref == VersionRef("r", 1)
    world.publisher.close()
    assert rival.publish(model).wait(DEADLINE_S) == VersionRef("r", 3)
    rival.close()


def test_a_newer_epoch_ends_the_publisher_before_it_writes_a_manifest(world: World) -> None:
    world.publish()
    rival = Publisher.resume(world.clean, "r", world.base)
    with pytest.raises(StaleEpochError, match="epoch 2"):
        world.publish()
    with pytest.raises(PublisherClosedError, match="StaleEpochError"):
        world.publisher.publish(world.model)
    world.publisher.close()
    assert world.clean.open_run("r").newest() == 2  # which fenced it off
    assert rival.publish(world.model).wait(DEADLINE_S) == VersionRef("r", 3)
    rival.close()
    world.assert_published(3)


def test_what_waits_behind_a_fatal_failure_fails_too(world: World) -> None:
    gate = Gate(world.publisher._pipeline)
    first = world.ticket()
    gate.wait_entered()
    second = world.ticket()
    Publisher.resume(world.clean, "r", world.base).close()
    gate.let_pass(2)
    with pytest.raises(StaleEpochError):
        first.wait(DEADLINE_S)
    with pytest.raises(PublisherClosedError):
        second.wait(DEADLINE_S)
    world.publisher.close()


def test_a_failure_nobody_waited_for_surfaces_once_at_flush(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.store.fill_up(".patch")
    with caplog.at_level(logging.ERROR, "stitch"):
        world.ticket()
        with pytest.raises(StoreFullError):
            world.publisher.flush(DEADLINE_S)
    failures = [r for r in caplog.records if "event=publish_failed" in r.getMessage()]
    assert len(failures) == 1
    world.publisher.flush(DEADLINE_S)
    world.publisher.close()


def test_a_failure_nobody_waited_for_surfaces_at_close(world: World) -> None:
    world.store.fill_up(".patch")
    world.ticket()
    with pytest.raises(StoreFullError):
        world.publisher.close()
    world.publisher.close()


def test_a_failure_that_was_noticed_is_not_raised_again(world: World) -> None:
    world.store.fill_up(".patch")
    ticket = world.ticket()
    with pytest.raises(StoreFullError):
        ticket.wait(DEADLINE_S)
    assert isinstance(ticket.error, StoreFullError)
    world.publisher.close()


def test_a_flush_error_does_not_hide_the_bodys_own(world: World) -> None:
    world.store.fill_up(".patch")

    def train() -> None:
        with world.publisher:
            world.ticket()
            raise RuntimeError("the trainer broke")

    with pytest.raises(RuntimeError, match="the trainer broke") as caught:
        train()
    assert "the store is full" in caught.value.__notes__[0]


def test_an_error_in_the_encoder_fails_the_ticket_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish()
    with monkeypatch.context() as patch:
        patch.setattr(
            "stitch.publish.pipeline.PatchEncoder",
            lambda *a, **k: (_ for _ in ()).throw(MemoryError()),
        )
        with pytest.raises(MemoryError):
            world.publish()
    assert world.publish() == VersionRef("r", 2)
    world.assert_published(2)
    world.publisher.close()


def test_a_copy_that_fails_midway_gives_its_buffer_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish()
    from stitch.tensors import torch_state

    real = torch_state.copy_words
    calls = iter(range(99))

    def failing(spec: object, tensor: object, out: object) -> None:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        real(spec, tensor, out)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(torch_state, "copy_words", failing)
        with pytest.raises(torch.OutOfMemoryError):
            world.ticket()
    assert world.publish() == VersionRef("r", 2)
    world.assert_published(2)
    world.publisher.close()


def test_a_copy_that_fails_over_a_waiting_snapshot_tells_its_ticket(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stitch.tensors import torch_state

    gate = Gate(world.publisher._pipeline)
    first = world.ticket()
    gate.wait_entered()
    waiting = world.ticket()

    def failing(spec: object, tensor: object, out: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch_state, "copy_words", failing)
        with pytest.raises(torch.OutOfMemoryError):
            world.ticket()
    with pytest.raises(torch.OutOfMemoryError):
        waiting.wait(DEADLINE_S)
    gate.let_pass(2)
    assert first.wait(DEADLINE_S) == VersionRef("r", 1)
    assert world.publish() == VersionRef("r", 2)
    world.assert_published(2)
    world.publisher.close()


def test_the_head_is_only_a_hint(world: World) -> None:
    world.store.fail("head.json", times=None)
    assert world.publish() == VersionRef("r", 1)
    assert world.publish() == VersionRef("r", 2)
    world.assert_published(2)
    world.publisher.close()


def test_a_failed_start_leaves_no_run(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base.safetensors", TinyModel())
    clean = quick_board(tmp_path / "board")
    store = FaultyStore(clean.store)
    store.fail("schema-", times=None)
    with pytest.raises(StoreError):
        Publisher.start(Board(store, patience=IMPATIENT), "r", base)
    assert clean.runs() == []
    Publisher.start(clean, "r", base).close()


def test_a_start_that_dies_before_its_epoch_can_be_resumed(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base.safetensors", TinyModel())
    clean = quick_board(tmp_path / "board")
    store = FaultyStore(clean.store)
    store.fail("epochs/", times=None)
    with pytest.raises(StoreError):
        Publisher.start(Board(store, patience=IMPATIENT), "r", base)
    with Publisher.open(clean, "r", base) as publisher:
        assert publisher.publish(TinyModel()).wait(DEADLINE_S) == VersionRef("r", 1)
