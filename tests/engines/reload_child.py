"""A replica's work on generations, until a failpoint kills its process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from reload_kit import MemoryStock, ToyEngine, digest_of, load

from stitch import failpoints
from stitch.codec import DigestState, UpdateSet
from stitch.engines.reload.engine import ReloadEngine
from stitch.engines.reload.generations import Generations
from stitch.tensors import HostWeights
from stitch.testing.engine_contract import flip_update
from stitch.types import Schema, TensorSpec, VersionRef

RUN = "killed"


def change_to(version: int, weights: HostWeights) -> UpdateSet:
    """What leads to a version: always the same from the same weights."""
    return flip_update(weights, seed=version)


async def work(directory: Path, base: Path, num_versions: int) -> None:
    """Open the generations in `directory` and bring an engine to further versions."""
    generations = Generations.open(directory, base, "bf16", run=RUN, threads=1)
    engine = await ReloadEngine.opened(
        MemoryStock(ToyEngine(generations.link)), generations, fresh=True
    )
    ref = generations.current.ref or VersionRef(RUN, 0)
    weights = load(generations.link)
    await engine.bind(ref, digest_of(weights))
    for version in range(ref.version + 1, num_versions + 1):
        update = change_to(version, weights)
        target = VersionRef(RUN, version)
        await engine.stage(f"to-{version}", ref, target, update)
        await engine.commit(f"to-{version}")
        update.apply(weights)
        ref = target
    await engine.close()


def work_until(failpoint: str, directory: Path, base: Path, num_versions: int) -> None:
    """The same, in a process that was forked and is killed at `NAME:K`."""
    failpoints._armed = failpoint
    failpoints._name, _, count = failpoint.partition(":")
    failpoints._left = int(count)
    asyncio.run(work(directory, base, num_versions))


def _load_loops() -> None:
    """Compiled loops come from disk once, not in every fork."""
    schema = Schema.of([TensorSpec.of("a", "BF16", (1000,))])
    weights = HostWeights.allocate(schema)
    update = flip_update(weights, seed=0, per_tensor=200)
    DigestState.of(weights, threads=1).updated(update, weights)
    update.apply(weights, threads=1)


_load_loops()
