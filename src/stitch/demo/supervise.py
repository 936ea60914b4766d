"""The demo's story: start all, add a replica late, kill one, bring it back, prove the end."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stitch.board import Run
from stitch.codec import warm
from stitch.demo.fleet import Fleet
from stitch.demo.long_requests import LongRequests, post_json
from stitch.demo.models import prepare_model
from stitch.demo.processes import ChildDiedError
from stitch.demo.progress import Progress
from stitch.demo.report import Outcome, Proof, print_report, write_report
from stitch.demo.settings import RUN, DemoSettings
from stitch.demo.watch import FleetWatch
from stitch.errors import FatalError, UsageError
from stitch.types import Schema, TensorSpec

LATE_AT, KILL_AT = 3, 4
TICK_S = 0.1
LOOK_EVERY_S = 0.5
START_TIMEOUT_S = 300.0
CATCH_UP_TIMEOUT_S = 180.0
VERIFY_TIMEOUT_S = 120.0


def run_demo(settings: DemoSettings) -> int:
    """Run the demo; 0 if every replica's weights were proven equal and no request failed."""
    if settings.steps < KILL_AT + 2:
        raise UsageError(f"the demo needs at least {KILL_AT + 2} steps, got {settings.steps}")
    began_s = time.monotonic()
    with _work_directory(settings.work) as work:
        outcome = _play(settings, work)
        seconds = time.monotonic() - began_s
        report = write_report(settings.report, outcome, settings, seconds=seconds)
    print_report(report, settings.report)
    return 0 if report["bit_exact"] and not report["requests"]["failed"] else 1


@contextmanager
def _work_directory(chosen: Path | None) -> Iterator[Path]:
    """`chosen`, made if need be, or a temporary one that stays only when something went wrong."""
    if chosen is None:
        temporary = Path(tempfile.mkdtemp(prefix="stitch-demo-"))
        try:
            yield temporary
        except (UsageError, KeyboardInterrupt):
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        return
    chosen.mkdir(parents=True, exist_ok=True)
    if any(chosen.iterdir()):
        raise UsageError(f"{chosen} is not empty; the demo wants a directory of its own")
    yield chosen


def _play(settings: DemoSettings, work: Path) -> Outcome:
    with Progress() as progress:
        model = prepare_model(settings.model, tiny=settings.tiny, work=work, say=progress.say)
        progress.say(f"board and logs: {work}")
        compile_once(progress.say)
        try:
            with Fleet(settings, work, model) as fleet:
                return Story(fleet, progress).run()
        except ChildDiedError as error:
            progress.say(f"{error}; its last lines:\n{error.log_tail}")
            raise


def compile_once(say: Callable[[str], None]) -> None:
    """Fill numba's cache before the processes start, or each would compile the same loops."""
    started_s = time.monotonic()
    warm(Schema.of([TensorSpec.of("view", "BF16", (1,))]))
    if (took_s := time.monotonic() - started_s) > 5:
        say(f"compiled the codec's loops in {took_s:.0f} s (once on a machine)")


@dataclass
class Story:
    """What happens when. `tick` is called again and again until the trainer is done."""

    fleet: Fleet
    progress: Progress
    steps: list[dict[str, Any]] = field(default_factory=list)
    started: dict[str, Any] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)
    newest: int = 0
    killed_at: int | None = None
    killed_boot: str | None = None
    restarted: bool = False
    _looked_s: float = 0.0

    def run(self) -> Outcome:
        fleet = self.fleet
        self.progress.say(f"starting the trainer and {_counted(len(fleet.cast.early))}")
        fleet.start_trainer()
        for name in fleet.cast.early:
            fleet.start_replica(name)
        self._wait_for_run()
        tokens, pause_s = (400, fleet.cast.rest_s) if fleet.settings.tiny else (160, 8.0)
        self.requests = LongRequests(self._url_of, tokens, pause_s)
        for name in fleet.cast.all:
            self.requests.start(name)
        try:
            while not self.final:
                self._tick()
            self._wait_for_all()
            return self._prove()
        finally:
            self.requests.stop()

    # --- while it trains -----------------------------------------------------------------------

    def _wait_for_run(self) -> None:
        """Until the trainer has put its run on the board, and its weights proved to be the base."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self.started:
            self._hear()
            self._check(tuple(self.fleet.children))
            if time.monotonic() > deadline_s:
                raise FatalError(f"the trainer did not start within {START_TIMEOUT_S:.0f} s")
            _pause()
        self.run_on_board: Run = self.fleet.board.open_run(RUN)
        self.watch = FleetWatch(self.run_on_board)

    def _tick(self) -> None:
        self._hear()
        self._look()
        self._check(tuple(self.fleet.children))
        self._act()
        _pause()

    def _hear(self) -> None:
        """Take in what the trainer told."""
        for event in self.fleet.events.new():
            kind = event.pop("event")
            if kind == "started":
                self.started = event
                self.progress.say(
                    f"run {RUN!r} begins: {event['num_parameters'] / 1e6:.1f} M parameters, base "
                    f"digest {event['digest']}"
                )
            elif kind == "step":
                self.steps.append(event)
                self.progress.step(event)
            elif kind == "final":
                self.final = event

    def _look(self) -> None:
        """Read the board now and then."""
        if time.monotonic() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = time.monotonic()
        self.watch.look()
        self.newest = self.run_on_board.newest(self.newest)
        self.progress.status(self.newest, self.watch.beats)

    def _check(self, expected: tuple[str, ...]) -> None:
        for name in expected:
            child = self.fleet.children[name]
            if name == "trainer" and child.exit_code == 0:
                continue
            child.check()

    def _act(self) -> None:
        """The late start, the kill, the restart, and the word to the trainer that it suffices."""
        fleet, cast = self.fleet, self.fleet.cast
        if cast.late not in fleet.children and self.newest >= LATE_AT:
            self.progress.say(f"version {self.newest}: starting one more replica, {cast.late}")
            fleet.start_replica(cast.late)
        elif self.killed_at is None and self.newest >= KILL_AT and self._others_serve():
            self._kill()
        elif self.killed_at is not None and not self.restarted and self._is_behind():
            self.progress.say(f"version {self.newest}: starting {cast.killed} again")
            fleet.start_replica(cast.killed)
            self.restarted = True
        elif self._all_there() and not fleet.enough.exists():
            fleet.enough.touch()

    def _others_serve(self) -> bool:
        """Whether requests find a replica while the one to be killed is not there."""
        cast = self.fleet.cast
        return any(self.watch.ready_at(name, 1) for name in cast.all if name != cast.killed)

    def _is_behind(self) -> bool:
        """Whether there is something that the killed replica missed, or nothing more to come."""
        return self.newest > (self.killed_at or 0) or bool(self.final)

    def _kill(self) -> None:
        name = self.fleet.cast.killed
        child = self.fleet.children.pop(name)
        self.killed_at = self.newest
        beat = self.watch.beats.get(name)
        self.killed_boot = beat.boot if beat else None
        self.progress.say(f"version {self.newest}: SIGKILL to {name} (pid {child.pid})")
        child.kill()

    def _all_there(self) -> bool:
        """Whether the late and the restarted replica serve what was new when they began."""
        cast = self.fleet.cast
        if not self.restarted or cast.late not in self.fleet.children:
            return False
        back = self.watch.ready_at(cast.killed, KILL_AT, other_than_boot=self.killed_boot)
        return back and self.watch.ready_at(cast.late, LATE_AT)

    def _url_of(self, replica: str) -> str | None:
        """Where `replica` can be reached; None while it is known not to be there."""
        beat = self.watch.beats.get(replica)
        if beat is None or not beat.ready or replica not in self.fleet.children:
            return None
        killed = self.fleet.cast.killed
        if replica == killed and beat.boot == self.killed_boot and self.restarted:
            return None
        return beat.url

    # --- afterwards ----------------------------------------------------------------------------

    def _wait_for_all(self) -> None:
        """Until every replica serves the final version."""
        version = self.final["version"]
        self.progress.say(f"trainer done at version {version}; waiting for the replicas")
        deadline_s = time.monotonic() + CATCH_UP_TIMEOUT_S
        while not (self.restarted and all(self._at(n, version) for n in self.fleet.cast.all)):
            self._look()
            self._check(tuple(self.fleet.children))
            self._act()
            if time.monotonic() > deadline_s:
                raise FatalError(f"replicas did not reach version {version}: {self._states()}")
            _pause()

    def _at(self, name: str, version: int) -> bool:
        boot = self.killed_boot if name == self.fleet.cast.killed else None
        return self.watch.ready_at(name, version, other_than_boot=boot)

    def _states(self) -> str:
        beats = self.watch.beats
        return "; ".join(
            f"{name}: {beats[name].state.value} at {beats[name].applied}, {beats[name].reason}"
            if name in beats
            else f"{name}: not seen"
            for name in self.fleet.cast.all
        )

    def _prove(self) -> Outcome:
        """Have every engine recompute the digest of the weights it holds."""
        proofs = []
        cast = self.fleet.cast
        for name in cast.all:
            self.progress.say(f"{name}: recomputing the digest of the weights its engine holds")
            url = self.watch.beats[name].url
            found = post_json(f"{url}/verify", {}, VERIFY_TIMEOUT_S)
            proofs.append(
                Proof(
                    id=name,
                    version=int(found["version"]),
                    digest=str(found["digest"]),
                    joined=cast.joined(name),
                    killed=name == cast.killed,
                )
            )
        self.watch.look()
        self.requests.stop()
        return Outcome(
            trainer_version=int(self.final["version"]),
            trainer_digest=str(self.final["digest"]),
            base_digest=str(self.started["digest"]),
            proofs=tuple(proofs),
            steps=tuple(self.steps),
            commits=tuple(self.watch.commits()),
            manifests=tuple(self.run_on_board.manifests(1, int(self.final["version"]) + 1)),
            view_bytes=self.run_on_board.record.num_bytes,
            long_answers=tuple(self.requests.answers),
            long_errors=tuple(self.requests.errors),
            long_retried=self.requests.retried,
        )


def _counted(replicas: int) -> str:
    return "a replica" if replicas == 1 else f"{replicas} replicas"


def _pause() -> None:
    threading.Event().wait(TICK_S)
