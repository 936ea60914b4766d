"""Answers of an engine against those of fresh ones, started on what `stitch checkout` writes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from real_kit import digest_of
from real_models import real_change

from stitch.board import open_board
from stitch.engines.port import Engine
from stitch.publish import Publisher
from stitch.tensors import HostWeights
from stitch.types import VersionRef

RUN = "equality"
NUM_PATCHES = 20


def at(version: int) -> VersionRef:
    return VersionRef(RUN, version)


async def advance(engine: Engine, weights: HostWeights, version: int) -> None:
    """Commit a large change that leads to `version`."""
    update = real_change(weights, seed=version)
    await engine.stage(f"to-{version}", at(version - 1), at(version), update)
    await engine.commit(f"to-{version}")
    update.apply(weights)


async def equal_to_fresh_engines_after_1_and_20_patches(
    engine: Engine,
    weights: HostWeights,
    base: Path,
    place: Path,
    answers: Callable[[], Awaitable[list[list[int]]]],
    fresh_answers: Callable[[Path], Awaitable[list[list[int]]]],
) -> None:
    """`weights`: what the engine holds, those of `base`; they follow it. `answers`: greedy tokens
    that it gives, `fresh_answers` those of a new engine on a checkpoint."""
    found = {0: await answers()}
    await engine.bind(at(0), digest_of(weights))
    with Publisher.start(open_board(place / "board"), RUN, base, threads=1) as publisher:
        for version in range(1, NUM_PATCHES + 1):
            await advance(engine, weights, version)
            await asyncio.to_thread(publisher.publish(weights, step=version).wait)
            if version in (1, NUM_PATCHES):
                assert (await engine.verify()).digest == publisher.run.digest(version)
                found[version] = await answers()
    assert found[0] != found[1] != found[NUM_PATCHES]
    for version in (1, NUM_PATCHES):
        checkpoint = await checkout(place / "board", RUN, version, base)
        assert await fresh_answers(checkpoint) == found[version], f"version {version}"


async def checkout(board: Path, run: str, version: int, base: Path) -> Path:
    """The directory that `stitch checkout` writes."""
    out = board.parent / f"checkout-{version}"
    command = [sys.executable, "-m", "stitch.cli", "checkout", str(version), "--out", str(out)]
    process = await asyncio.create_subprocess_exec(
        *command, "--board", str(board), "--run", run, "--base", str(base), "--threads", "1"
    )
    assert await process.wait() == 0
    return out
