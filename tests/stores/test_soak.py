"""The soak: a trainer and eight replicas, killed at random over 200 publishes, on SeaweedFS.

`STITCH_SOAK_SEED` repeats the plan of a run (which kills, when, at which points; what the machine
makes of it is another matter). `STITCH_SOAK_VERSIONS` makes it shorter or longer.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import soak_roles
from soak_roles import ANCHOR_EVERY, RUN
from store_kit import OpenBoard
from store_servers import Server

from stitch.board import Board, keys
from stitch.mirror import Mirror
from stitch.tensors import open_checkpoint, write_safetensors
from stitch.testing.fault_proxy import FaultProxy
from stitch.testing.published import digest_of

NUM_VERSIONS = int(os.environ.get("STITCH_SOAK_VERSIONS", "200"))
NUM_REPLICAS = 8
BUDGET_S = 420.0
"""For publishing everything."""
KILLS_S = 150.0
"""Kills end after so long, so that what is left of the time suffices in any case."""
SETTLE_S = 120.0

FAILPOINTS = [
    "publish.snapshot",
    "publish.encoded",
    "publish.blob",
    "publish.before_manifest",
    "publish.after_manifest",
    "publish.head",
    "board.blob.done",
    "board.head",
]


@dataclass
class Fleet:
    """The processes, who is killed when, and what was said."""

    folder: Path
    url: str
    proxied_url: str
    environment: dict[str, str]
    rng: random.Random
    num_kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["soak_roles"])
        self.base = self.folder / "base.safetensors"
        write_safetensors(self.base, soak_roles.base_weights())
        self.trainer: BaseProcess | None = None
        self.trainer_dies_s = 0.0
        self.replicas: list[BaseProcess | None] = [None] * NUM_REPLICAS
        self.replica_dies_s = [0.0] * NUM_REPLICAS

    def told(self) -> list[str]:
        path = self.folder / "told"
        return path.read_text().split("\n") if path.exists() else []

    def held(self, number: int) -> list[tuple[int, str]]:
        """What a replica said it held, in all its lives; a line cut short by a kill is left out."""
        path = self.folder / f"held-{number}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        words = [line.split() for line in lines]
        return [(int(version), digest) for version, digest in words]

    def tend_trainer(self, kills: bool) -> None:
        if self.trainer is not None and self.trainer.is_alive():
            if kills and time.monotonic() > self.trainer_dies_s:
                self.trainer.kill()
                self.trainer.join()
                self.num_kills["trainer, at a time"] += 1
            return
        if self.trainer is not None and self.trainer.exitcode:
            assert self.trainer.exitcode == -9, "the trainer failed; see its output"
            self.num_kills["trainer"] += 1
        failpoint = ""
        if kills and self.rng.random() < 0.6:
            failpoint = f"{self.rng.choice(FAILPOINTS)}:{self.rng.randint(1, 25)}"
        self.trainer_dies_s = time.monotonic() + self.rng.uniform(2.0, 15.0)
        arguments = (self.proxied_url, self.environment, str(self.base), str(self.folder / "told"))
        self.trainer = self.context.Process(
            target=soak_roles.trainer, args=(*arguments, failpoint, NUM_VERSIONS), daemon=True
        )
        self.trainer.start()

    def tend_replicas(self, kills: bool) -> None:
        for number, process in enumerate(self.replicas):
            if process is not None and process.is_alive():
                if not kills or time.monotonic() < self.replica_dies_s[number]:
                    continue
                process.kill()
                process.join()
                self.num_kills["replica"] += 1
            self.replica_dies_s[number] = time.monotonic() + self.rng.uniform(5.0, 40.0)
            held = str(self.folder / f"held-{number}")
            arguments = (self.url, self.environment, str(self.base), held, f"r{number}")
            process = self.context.Process(
                target=soak_roles.replica,
                args=(*arguments, self.rng.random() < 0.5),
                daemon=True,
            )
            process.start()
            self.replicas[number] = process

    def stop(self) -> None:
        for process in [self.trainer, *self.replicas]:
            if process is not None and process.is_alive():
                process.kill()
                process.join()


def plan_faults(proxy: FaultProxy, rng: random.Random) -> None:
    """A few things that go wrong between the trainer and its store from now on."""
    proxy.heal()
    for _ in range(3):
        after = rng.randint(0, 30)
        match rng.randint(0, 4):
            case 0:
                proxy.answer(rng.choice([429, 500, 503]), code="SlowDown", after=after, times=2)
            case 1:
                proxy.lose_reply("manifest.json", methods=("PUT",), after=rng.randint(0, 3))
            case 2:
                proxy.lose_reply(after=after)
            case 3:
                proxy.drop(after=after)
            case 4:
                proxy.answer(409, "manifest.json", code="OperationAborted", methods=("PUT",))


def wait_until(done: Callable[[], bool], tend: Callable[[], None], deadline_s: float) -> None:
    while not done():
        assert time.monotonic() < deadline_s, "out of time"
        tend()
        time.sleep(0.05)


@pytest.mark.timeout(BUDGET_S + SETTLE_S + 60)
def test_nothing_is_lost_when_everybody_is_killed_at_random(
    seaweedfs: Server, open_on: OpenBoard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("STITCH_SOAK_SEED") or random.randrange(2**32))
    with capsys.disabled():
        print(f"\nsoak: STITCH_SOAK_SEED={seed} STITCH_SOAK_VERSIONS={NUM_VERSIONS}", flush=True)
    rng = random.Random(seed)
    started_s = time.monotonic()
    prefix = seaweedfs.fresh_prefix()
    board = open_on(seaweedfs, prefix)
    digests = soak_roles.expected_digests(NUM_VERSIONS)
    with FaultProxy(seaweedfs.endpoint) as proxy:
        fleet = Fleet(
            folder=tmp_path,
            url=seaweedfs.board_url(prefix),
            proxied_url=seaweedfs.board_url(prefix, port=proxy.port),
            environment=seaweedfs.environment,
            rng=rng,
        )
        try:
            run_fleet(fleet, proxy, board, started_s)
        finally:
            fleet.stop()
    check(fleet, board, digests)
    summary = {
        "seed": seed,
        "versions": NUM_VERSIONS,
        "kills": dict(fleet.num_kills),
        "seconds": round(time.monotonic() - started_s, 1),
    }
    with capsys.disabled():
        print(f"soak: {json.dumps(summary)}", flush=True)


def run_fleet(fleet: Fleet, proxy: FaultProxy, board: Board, started_s: float) -> None:
    """Until all is published and every replica, in its last life, holds it."""
    newest = 0
    next_faults_s = started_s

    def published() -> bool:
        nonlocal newest
        if RUN in board.runs():
            newest = board.open_run(RUN).newest(newest)
        return newest == NUM_VERSIONS

    def tend() -> None:
        nonlocal next_faults_s
        kills = time.monotonic() < started_s + KILLS_S
        if time.monotonic() > next_faults_s:
            plan_faults(proxy, fleet.rng)
            next_faults_s = time.monotonic() + fleet.rng.uniform(0.5, 4.0)
        fleet.tend_trainer(kills)
        fleet.tend_replicas(kills)

    wait_until(published, tend, started_s + BUDGET_S)
    wait_until(
        lambda: all(is_at(fleet, number, NUM_VERSIONS) for number in range(NUM_REPLICAS)),
        lambda: fleet.tend_replicas(kills=False),
        time.monotonic() + SETTLE_S,
    )


def is_at(fleet: Fleet, number: int, version: int) -> bool:
    held = fleet.held(number)
    return bool(held) and held[-1][0] == version


def check(fleet: Fleet, board: Board, digests: list[str]) -> None:
    run = board.open_run(RUN)
    assert run.newest() == NUM_VERSIONS
    manifests = list(run.manifests(1, NUM_VERSIONS + 1))
    # Every version once, in a chain of just what the trainer had.
    assert [run.digest(version) for version in range(NUM_VERSIONS + 1)] == digests
    assert [manifest.digest_before for manifest in manifests] == digests[:-1]
    assert len({manifest.attempt for manifest in manifests}) == NUM_VERSIONS
    assert board.store.head(keys.manifest(RUN, NUM_VERSIONS + 1)) is None
    # What a trainer was told is published is, and was told once.
    told = [int(line.split()[1]) for line in fleet.told() if line.startswith("published ")]
    assert len(set(told)) == len(told)
    assert set(told) <= set(range(1, NUM_VERSIONS + 1))
    # Everything that any replica ever held was a version, with its bits.
    for number in range(NUM_REPLICAS):
        held = fleet.held(number)
        assert held[-1] == (NUM_VERSIONS, digests[-1])
        assert all(digest == digests[version] for version, digest in held)
    # Nothing is lost: the newest version can be rebuilt from the base, and from every anchor.
    with open_checkpoint(fleet.base) as checkpoint:
        mirrors = [Mirror.load(checkpoint, threads=1)]
    mirrors[0].identify(run)
    for version in run.anchors():
        record = run.anchor(version)
        assert record is not None
        assert record.digest == digests[version]
        mirrors.append(Mirror.from_anchor(run, record))
    assert len(mirrors) > 1 or NUM_VERSIONS < 2 * ANCHOR_EVERY
    for mirror in mirrors:
        mirror.advance(run, threads=1)
        assert digest_of(mirror.weights) == digests[-1]
    assert fleet.num_kills["replica"] > 0
    assert fleet.num_kills["trainer"] + fleet.num_kills["trainer, at a time"] > 0
