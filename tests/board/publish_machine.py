"""A state machine of publishers and readers on one store that fails and crashes under them.

The model is a list: version -> digest, weights and attempt. After every step the board, read
without faults, must show exactly that list. Publishers crash at any request; what became of their
last attempt is read back from the board, and must be nothing or just that version.

Subclass it with `fresh_store`, which gives an empty store:

    class OnMyStore(PublishMachine):
        def fresh_store(self): ...
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stitch.board import Board, Patience, Run
from stitch.board.stores.store import ObjectStore
from stitch.errors import (
    CorruptRecordError,
    PublishConflictError,
    RetryableError,
    StaleEpochError,
    StoreError,
)
from stitch.mirror import AdvanceError, Mirror
from stitch.publish import RetryPolicy, write_anchor
from stitch.publish.lineage import Lineage, resume_run, start_run
from stitch.publish.pipeline import Pipeline
from stitch.records import Manifest
from stitch.tensors import HostWeights, open_checkpoint, write_safetensors
from stitch.testing.faults import FaultyStore
from stitch.testing.published import copy_of, digest_of
from stitch.testing.synthetic import adam_step, synthetic_schema, synthetic_weights
from stitch.types import VersionRef

RUN = "r"
QUICK = Patience(num_tries=4, first_wait_s=0.0005, max_wait_s=0.001)
RETRY = RetryPolicy(max_attempts=2, first_delay_s=0.0005, max_delay_s=0.001)
MOST_REQUESTS = 14
"""A publish makes fewer, so that a crash may also come after it."""

FAULTS = st.sampled_from(["fail", "lose_reply", "conflict", "fill_up", "hide", "shorten"])
PLACES = st.integers(0, MOST_REQUESTS)
SEEDS = st.integers(0, 2**16)


class CrashError(BaseException):
    """The process ended here. Nothing may catch it."""


class ProbedBoard(Board):
    """A board on a store that was probed when the run began: once is enough here."""

    def check_store(self) -> None:
        return


@dataclass
class Version:
    digest: str
    weights: HostWeights
    attempt: str | None
    """Of its manifest; None for the base."""


@dataclass
class Trainer:
    store: FaultyStore
    pipeline: Pipeline


class PublishMachine(RuleBasedStateMachine):
    def fresh_store(self) -> ObjectStore:
        raise NotImplementedError("give an empty store in your subclass")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="stitch-machine-"))
        self.base = self.folder / "base.safetensors"
        self.store = self.fresh_store()
        self.truth: list[Version] = []
        self.trainers: list[Trainer] = []
        self.readers: list[Mirror] = []

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- what is done ------------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        weights = synthetic_weights(synthetic_schema(hidden=4, layers=1))
        write_safetensors(self.base, weights)
        Board(self.store, patience=QUICK).check_store()
        store = FaultyStore(self.store)
        board = ProbedBoard(store, patience=QUICK)
        lineage = start_run(board, RUN, self.base, "checkpoint", None, 1)
        self.truth = [Version(lineage.baseline.digest, weights, None)]
        self._begin(store, lineage)

    @precondition(lambda self: self.trainers)
    @rule(seed=SEEDS, data=st.data())
    def publish(self, seed: int, data: st.DataObject) -> None:
        """Without faults the holder of the newest epoch publishes, and nobody else can."""
        trainer = data.draw(st.sampled_from(self.trainers))
        weights, digest = self._train(seed)
        if not self._holds_epoch(trainer):
            self.trainers.remove(trainer)
            with pytest.raises((StaleEpochError, PublishConflictError)):
                trainer.pipeline.publish(weights, None)
            return
        told: VersionRef | None = None
        try:
            told = trainer.pipeline.publish(weights, seed).ref
        except PublishConflictError:
            self._was_overtaken(trainer)
        self._settle(digest, weights, told)

    @precondition(lambda self: self.trainers)
    @rule(seed=SEEDS, kind=FAULTS, after=PLACES, times=st.integers(1, 3), data=st.data())
    def publish_through_faults(
        self, seed: int, kind: str, after: int, times: int, data: st.DataObject
    ) -> None:
        trainer = data.draw(st.sampled_from(self.trainers))
        weights, digest = self._train(seed)
        getattr(trainer.store, kind)(after=after, times=times)
        told: VersionRef | None = None
        try:
            told = trainer.pipeline.publish(weights, seed).ref
        except (RetryableError, CorruptRecordError):
            pass  # a body that is short and calls itself whole is damage to whoever reads it
        except (StaleEpochError, PublishConflictError):
            self._was_overtaken(trainer)
        finally:
            trainer.store.heal()
        self._settle(digest, weights, told)

    @precondition(lambda self: self.trainers)
    @rule(seed=SEEDS, after=PLACES, is_done=st.booleans())
    def publish_and_crash(self, seed: int, after: int, is_done: bool) -> None:
        """Crash at some request, before or after the store did it."""
        trainer = self.trainers.pop()
        weights, digest = self._train(seed)
        crash(trainer.store, after, is_done)
        told: VersionRef | None = None
        try:
            told = trainer.pipeline.publish(weights, seed).ref
        except CrashError:
            pass
        except (StaleEpochError, PublishConflictError):
            self.trainers.append(trainer)
            self._was_overtaken(trainer)
        self._settle(digest, weights, told)

    @precondition(lambda self: len(self.trainers) < 3)
    @rule(from_anchor=st.booleans())
    def resume(self, from_anchor: bool) -> None:
        """A trainer, here or elsewhere, goes on from the newest version."""
        store = FaultyStore(self.store)
        board = ProbedBoard(store, patience=QUICK)
        has_anchor = bool(self._open().anchors())
        base = self.folder / "gone" if from_anchor and has_anchor else self.base
        lineage = resume_run(board, RUN, base, None, 1, self.folder / "scratch")
        assert lineage.baseline.ref == VersionRef(RUN, len(self.truth) - 1)
        assert lineage.baseline.digest == self.truth[-1].digest
        self._begin(store, lineage)

    @rule(after=PLACES, is_done=st.booleans())
    def resume_and_crash(self, after: int, is_done: bool) -> None:
        """It may have begun an epoch, which then nobody holds."""
        store = FaultyStore(self.store)
        crash(store, after, is_done)
        with contextlib.suppress(CrashError):
            board = ProbedBoard(store, patience=QUICK)
            resume_run(board, RUN, self.base, None, 1, None)

    @rule(after=PLACES, crashes=st.booleans(), is_done=st.booleans(), data=st.data())
    def anchor(self, after: int, crashes: bool, is_done: bool, data: st.DataObject) -> None:
        version = data.draw(st.integers(0, len(self.truth) - 1))
        store = FaultyStore(self.store)
        run = ProbedBoard(store, patience=QUICK).open_run(RUN)
        if crashes:
            crash(store, after, is_done)
        with contextlib.suppress(CrashError):
            write_anchor(run, self.truth[version].weights, version)
            assert version in self._open().anchors()
        store.heal()
        for found in self._open().anchors():
            record = self._open().anchor(found)
            assert record is not None
            assert record.digest == self.truth[found].digest

    @rule(data=st.data())
    def spoil_the_head(self, data: st.DataObject) -> None:
        """A hint that is old, missing or garbage."""
        old = data.draw(st.integers(0, len(self.truth) - 1))
        if old == 0:
            self.store.delete(f"{RUN}/head.json")
        elif old == 1:
            self.store.put(f"{RUN}/head.json", b"{", mode="overwrite")
        else:
            self._open().write_head(old)

    @precondition(lambda self: len(self.readers) < 3)
    @rule()
    def boot_reader(self) -> None:
        with open_checkpoint(self.base) as checkpoint:
            self.readers.append(Mirror.load(checkpoint, threads=1))
        self.readers[-1].identify(self._open())

    @precondition(lambda self: self.readers)
    @rule()
    def kill_reader(self) -> None:
        self.readers.pop(0)

    @precondition(lambda self: self.readers)
    @rule()
    def follow(self) -> None:
        """Without faults every reader reaches the newest version."""
        for reader in self.readers:
            reader.advance(self._open(), threads=1)
            assert reader.ref == VersionRef(RUN, len(self.truth) - 1)

    @precondition(lambda self: self.readers)
    @rule(kind=FAULTS, after=PLACES, times=st.integers(1, 8))
    def follow_through_faults(self, kind: str, after: int, times: int) -> None:
        store = FaultyStore(self.store)
        run = ProbedBoard(store, patience=QUICK).open_run(RUN)
        getattr(store, kind)(after=after, times=times)
        with contextlib.suppress(AdvanceError, StoreError, CorruptRecordError):
            self.readers[0].advance(run, threads=1)

    # --- what must hold ----------------------------------------------------------------------

    @invariant()
    def the_board_shows_the_truth(self) -> None:
        if not self.truth:
            return
        run = self._open()
        assert run.newest() == len(self.truth) - 1
        for version, wanted in enumerate(self.truth):
            assert run.digest(version) == wanted.digest
            if version:
                found = run.manifest(version)
                assert found.digest_before == self.truth[version - 1].digest
                assert found.attempt == wanted.attempt

    @invariant()
    def readers_hold_what_they_say(self) -> None:
        for reader in self.readers:
            assert reader.ref is not None
            assert reader.digest == self.truth[reader.ref.version].digest
            assert digest_of(reader.weights) == reader.digest

    # --- how ---------------------------------------------------------------------------------

    def _open(self) -> Run:
        return ProbedBoard(self.store, patience=QUICK).open_run(RUN)

    def _begin(self, store: FaultyStore, lineage: Lineage) -> None:
        pipeline = Pipeline(
            lineage.run,
            lineage.baseline,
            lineage.epoch,
            threads=1,
            retry=RETRY,
            pause=lambda _: None,
        )
        self.trainers.append(Trainer(store, pipeline))

    def _train(self, seed: int) -> tuple[HostWeights, str]:
        """The next weights; every call gives others."""
        weights = copy_of(self.truth[-1].weights)
        adam_step(weights, 0.05, seed=seed)
        return weights, digest_of(weights)

    def _settle(self, digest: str, weights: HostWeights, told: VersionRef | None) -> None:
        """Read back what became of an attempt; it was published if its trainer was told so."""
        run = self._open()
        number = len(self.truth)
        newest = run.newest()
        assert newest in (number - 1, number)
        assert told is None or (told == VersionRef(RUN, number) and newest == number)
        if newest == number:
            manifest: Manifest = run.manifest(number)
            assert manifest.digest_after == digest
            self.truth.append(Version(digest, copy_of(weights), manifest.attempt))

    def _was_overtaken(self, trainer: Trainer) -> None:
        """A trainer stops only for another one: a newer epoch, or a version that it does not know.

        One of an older epoch may publish once more if it looked for a newer one just before that
        began, or was shown that there is none.
        """
        knows_all = trainer.pipeline.ref.version == len(self.truth) - 1
        assert not (self._holds_epoch(trainer) and knows_all)
        self.trainers.remove(trainer)

    def _holds_epoch(self, trainer: Trainer) -> bool:
        current = ProbedBoard(self.store, patience=QUICK).current_epoch()
        assert current is not None
        return current == trainer.pipeline.epoch


def crash(store: FaultyStore, after: int, is_done: bool) -> None:
    """From request number `after` on the process is dead: the request is done or not, once."""
    if is_done:
        store.lose_reply(after=after, times=1).error = CrashError()  # type: ignore[assignment]
    store.fail(after=after, times=None).error = CrashError()  # type: ignore[assignment]


def machine_on(fresh: Callable[[], ObjectStore]) -> type[PublishMachine]:
    """The machine on stores that `fresh` gives."""

    class Machine(PublishMachine):
        def fresh_store(self) -> ObjectStore:
            return fresh()

    return Machine
