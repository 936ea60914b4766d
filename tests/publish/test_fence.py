"""Two trainers on one run: exactly one wins each version, and one that slept wakes up too late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stitch.board import Board, keys, process
from stitch.errors import PublishConflictError, StaleEpochError
from stitch.mirror import Mirror
from stitch.publish import Publisher
from stitch.publish.pipeline import Pipeline
from stitch.records import EpochRecord
from stitch.tensors import HostWeights
from stitch.testing.published import (
    FEW_RETRIES,
    NO_RETRIES,
    PublishedRun,
    copy_of,
    digest_of,
    published_run,
)
from stitch.testing.synthetic import adam_step
from stitch.types import VersionRef


@pytest.fixture
def world(tmp_path: Path) -> PublishedRun:
    return published_run(tmp_path, 2)


def resume(world: PublishedRun) -> Publisher:
    board = Board(world.board.store, patience=world.board.patience)
    return Publisher.resume(board, "r", world.base, threads=1, retry=NO_RETRIES)


def trained(world: PublishedRun, seed: int) -> HostWeights:
    weights = copy_of(world.weights[-1])
    adam_step(weights, 0.02, seed=seed)
    return weights


class Asleep:
    """A publisher that falls asleep where it has seen that its epoch is the current one."""

    def __init__(self, publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sleeping, self._awake = threading.Event(), threading.Event()
        pipeline = publisher._pipeline
        real = pipeline._commit

        def commit(manifest: object) -> None:
            self.sleeping.set()
            assert self._awake.wait(60)
            real(manifest)  # type: ignore[arg-type]

        monkeypatch.setattr(pipeline, "_commit", commit)

    def wake(self) -> None:
        self._awake.set()


def test_one_that_wakes_up_after_a_new_epoch_began_publishes_nothing(
    world: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = resume(world)
    asleep = Asleep(old, monkeypatch)
    late = old.publish(trained(world, 70))
    assert asleep.sleeping.wait(60)
    new = resume(world)
    assert new.ref == VersionRef("r", 3)  # the number that the sleeper would take
    assert new.digest == world.digests[2]
    assert world.board.open_run("r").manifest(3).step == 20  # the step of these weights
    asleep.wake()
    with pytest.raises(PublishConflictError, match="r@3"):
        late.wait(60)
    weights = trained(world, 71)
    assert new.publish(weights).wait(60) == VersionRef("r", 4)
    old.close()
    new.close()
    run = world.board.open_run("r")
    assert (run.newest(), run.digest(4)) == (4, digest_of(weights))


def test_one_that_commits_while_the_next_one_begins_is_taken_up(
    world: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sleeper wakes after the new epoch began and before the fence: its version stands."""
    old = resume(world)
    asleep = Asleep(old, monkeypatch)
    weights = trained(world, 70)
    late = old.publish(weights)
    assert asleep.sleeping.wait(60)
    real = Pipeline.publish

    def publish(pipeline: Pipeline, snapshot: HostWeights, step: int | None) -> object:
        if pipeline is not old._pipeline and not late.done:
            asleep.wake()
            late.wait(60)
        return real(pipeline, snapshot, step)

    monkeypatch.setattr(Pipeline, "publish", publish)
    new = resume(world)
    assert late.wait(60) == VersionRef("r", 3)
    assert new.ref == VersionRef("r", 4)
    assert new.digest == digest_of(weights)
    with pytest.raises(StaleEpochError):
        old.publish(weights).wait(60)
    old.close()
    new.close()


def test_after_a_clean_end_there_is_nothing_to_fence_off(world: PublishedRun) -> None:
    resume(world).close()
    with resume(world) as publisher:
        assert publisher.ref == VersionRef("r", 2)


def test_a_version_in_doubt_is_not_a_clean_end(
    world: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = resume(world)
    monkeypatch.setattr(Pipeline, "in_doubt", property(lambda self: True))
    old.close()
    monkeypatch.undo()
    with resume(world) as publisher:
        assert publisher.ref == VersionRef("r", 3)


def begin(world: PublishedRun, run: str, name: str) -> EpochRecord:
    """An epoch of a process called `name`, which published nothing."""
    board = Board(world.board.store, patience=world.board.patience)
    record = EpochRecord(
        epoch=(board.current_epoch() or pytest.fail("no epoch")).epoch + 1,
        run=run,
        writer="w",
        created_unix_s=0.0,
        process=name,
    )
    assert board.store.put(keys.epoch(record.epoch), record.to_json_bytes(), mode="create")
    return record


def dead_process() -> str:
    """The name of a process of this machine that has ended."""
    code = "from stitch.board.process import this_process; print(this_process())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.is_gone(done.stdout.strip())
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("names", "fenced"),
    [
        (["dead"], False),
        (["alive"], True),
        ([""], True),
        (["elsewhere"], True),
        (["alive", "dead"], True),  # the dead one may have died before it fenced the living off
        (["dead", "dead"], False),
    ],
)
def test_only_processes_that_are_surely_gone_need_no_fence(
    world: PublishedRun, names: list[str], fenced: bool
) -> None:
    me = process.this_process()
    known = {"dead": dead_process(), "alive": me, "elsewhere": f"other-boot{me}"}
    for name in names:
        begin(world, "r", known.get(name, name))
        begin(world, "other", "")  # of another run: no matter
    with resume(world) as publisher:
        assert publisher.ref == VersionRef("r", 3 if fenced else 2)


def test_a_damaged_epoch_may_be_anybodys(world: PublishedRun) -> None:
    world.board.store.put(keys.epoch(2), b"{", mode="create")
    with resume(world) as publisher:
        assert publisher.ref == VersionRef("r", 3)


def test_a_damaged_end_of_an_epoch_is_none(world: PublishedRun) -> None:
    world.board.store.put(keys.epoch_end(1), b"{}", mode="overwrite")
    with resume(world) as publisher:
        assert publisher.ref == VersionRef("r", 3)


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "x 1 2", "x y 999999999999999999999 1", "x y -1 1", "x y one 1"]
)
def test_what_does_not_name_a_process_of_this_machine_is_not_gone(name: str) -> None:
    assert not process.is_gone(name)
    place = process.this_process().rsplit(" ", 2)[0]
    assert not process.is_gone(f"{place} {name}")


def test_this_process_is_not_gone_and_its_number_under_another_start_is() -> None:
    me = process.this_process()
    assert me
    assert not process.is_gone(me)
    assert process.is_gone(me.rsplit(" ", 1)[0] + " 1")


def test_racing_trainers_win_each_version_once_and_losers_are_told(world: PublishedRun) -> None:
    """Each takes the run over again and again; every version is one trainer's, in one line."""
    won: dict[int, str] = {}
    lock = threading.Lock()

    def train(number: int) -> None:
        board = Board(world.board.store, patience=world.board.patience)
        for attempt in range(3):
            publisher = None
            try:
                publisher = Publisher.resume(
                    board, "r", world.base, threads=1, retry=FEW_RETRIES, anchor_every=None
                )
                weights = trained(world, 100 * number + attempt)
                ref = publisher.publish(weights).wait(60)
                with lock:
                    assert ref.version not in won
                    won[ref.version] = digest_of(weights)
            except (StaleEpochError, PublishConflictError):
                pass  # told by name; anything else fails the test
            finally:
                if publisher is not None:
                    publisher.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, range(4)))
    run = Board(world.board.store).open_run("r")
    newest = run.newest()
    assert won
    for version in range(3, newest + 1):
        manifest = run.manifest(version)
        assert manifest.digest_before == run.digest(version - 1)
        if version in won:
            assert manifest.digest_after == won[version]
        else:  # a fence: nothing changed
            assert manifest.digest_after == manifest.digest_before
            assert manifest.stats.num_changed == 0
    mirror = Mirror.load(world.weights[0])
    mirror.identify(run)
    mirror.advance(run)
    assert mirror.digest == run.digest(newest)


SLEEPER = """
import os, signal, sys
sys.path.insert(0, {here!r})
from publish_child import trained
from stitch.publish import Publisher
from stitch.publish.pipeline import Pipeline
from stitch.testing.published import NO_RETRIES, quick_board
real = Pipeline._commit
def commit(pipeline, manifest):
    print("asleep", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    real(pipeline, manifest)
Pipeline._commit = commit
with Publisher.start(quick_board({board!r}), "r", {base!r}, threads=1, retry=NO_RETRIES) as one:
    try:
        one.publish(trained(1)).wait()
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


def test_a_stopped_process_that_is_let_go_on_has_lost_the_run(tmp_path: Path) -> None:
    import publish_child

    from stitch.tensors import write_safetensors
    from stitch.testing.published import quick_board

    base, where = tmp_path / "base.safetensors", tmp_path / "board"
    write_safetensors(base, publish_child.trained(0))
    here = str(Path(publish_child.__file__).parent)
    program = SLEEPER.format(here=here, board=str(where), base=str(base))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as sleeper:
        try:
            assert sleeper.stdout is not None
            assert sleeper.stdout.readline().strip() == "asleep"
            with Publisher.resume(quick_board(where), "r", base, threads=1) as publisher:
                assert publisher.ref == VersionRef("r", 1)
                os.kill(sleeper.pid, signal.SIGCONT)
                assert sleeper.stdout.readline().strip() == "PublishConflictError"
                second = publisher.publish(publish_child.trained(2)).wait(60)
                assert second == VersionRef("r", 2)
            assert sleeper.wait(60) == 0
        finally:
            sleeper.kill()
    run = quick_board(where).open_run("r")
    assert [run.digest(v) for v in (1, 2)] == [digest_of(publish_child.trained(v)) for v in (0, 2)]
