"""Times of a commit, of the NaN-staged loader and of a reload, in turns in one engine process.

A turn begins and ends with the base's weights: commit, roll back, the same patch by vLLM's loader,
a reload of the base's checkpoint. After each of them the engine's live weights are digested, so
that no figure stands for something that did not do its work.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._engine_models import inverse, random_update
from benchmarks._engine_server import Server
from stitch.codec import DigestState, UpdateSet
from stitch.tensors import HostWeights
from stitch.types import VersionRef

BASE, NEXT = VersionRef("benchmark", 0), VersionRef("benchmark", 1)
CHUNKS = (64 << 20, 512 << 20, 4 << 30)
"""Sizes of the NaN-staged loader's batches that are tried; 512 MiB is its default."""

Row = dict[str, Any]


@dataclass
class Times:
    """Milliseconds of every turn."""

    stage: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    nan_staged: list[float] = field(default_factory=list)
    reload: list[float] = field(default_factory=list)


class Commits:
    """Measures on one server, whose engine holds `weights`, loaded from `model`."""

    def __init__(self, server: Server, model: Path, weights: HostWeights, scratch: Path) -> None:
        self._server, self._model, self._weights = server, model, weights
        self._patch = scratch / "patch.npz"
        self._digest = DigestState.of(weights)
        self._chunk = CHUNKS[1]

    async def start(self) -> None:
        await self._server.client.bind(BASE, self._digest.version_digest())

    async def choose_chunk(self, update: UpdateSet) -> None:
        """Find the size of batches with which the NaN-staged loader is fastest."""
        await self._hand_over(update)
        found = {}
        for chunk in (*CHUNKS, *CHUNKS):  # the first time round warms up
            found[chunk] = await self._ms("nan_staged", chunk, False)
        self._chunk = min(found, key=lambda chunk: found[chunk])
        await self._ms("reload", str(self._model))
        await self._holds(self._digest)

    async def row(self, density: float, turns: int) -> Row:
        """Turns with random updates of the base; medians, and the best of each."""
        times = Times()
        changed = []
        for seed in range(turns):
            update = random_update(self._weights, density, seed, large=False)
            changed.append(update.num_changed)
            after = self._digest.updated(update, self._weights)
            await self._commit(update, after, times)
            written = await self._server.worker("benchmark_last_commit")
            await self._server.client.roll_back(BASE)
            await self._holds(self._digest)
            await self._hand_over(update)
            times.nan_staged.append(await self._ms("nan_staged", self._chunk, False))
            await self._holds(after)
            times.reload.append(await self._ms("reload", str(self._model)))
            await self._holds(self._digest)
        return self._row(times, round(statistics.mean(changed)), written)

    async def chain(self, updates: Sequence[UpdateSet]) -> Row:
        """The same for updates that follow one another: each is measured where it starts."""
        times = Times()
        changed = []
        for number, update in enumerate(updates):
            at, to = VersionRef("benchmark", number), VersionRef("benchmark", number + 1)
            after = self._digest.updated(update, self._weights)
            await self._hand_over(update)
            times.nan_staged.append(await self._ms("nan_staged", self._chunk, False))
            await self._holds(after)
            await self._hand_over(inverse(update))
            await self._ms("nan_staged", self._chunk, False)
            await self._holds(self._digest)
            await self._commit(update, after, times, at, to)
            written = await self._server.worker("benchmark_last_commit")
            update.apply(self._weights)
            self._digest = after
            changed.append(update.num_changed)
        for _ in updates:
            times.reload.append(await self._ms("reload", str(self._model)))
        return self._row(times, round(statistics.mean(changed)), written)

    async def _commit(
        self,
        update: UpdateSet,
        after: DigestState,
        times: Times,
        at: VersionRef = BASE,
        to: VersionRef = NEXT,
    ) -> None:
        client = self._server.client
        begin = time.perf_counter()
        await client.stage(f"to-{to.version}-{id(update)}", at, to, update)
        times.stage.append((time.perf_counter() - begin) * 1e3)
        receipt = await client.commit(f"to-{to.version}-{id(update)}")
        times.pause.append(receipt.pause_ms)
        await self._holds(after)

    async def _holds(self, state: DigestState) -> None:
        report = await self._server.client.verify()
        if report.digest != state.version_digest():
            raise SystemExit(f"the engine holds {report.digest}, not {state.version_digest()}")

    async def _hand_over(self, update: UpdateSet) -> None:
        arrays: dict[str, Any] = {}
        for part in update.updates:
            spec = self._weights.schema.tensors[part.tensor]
            arrays[f"{spec.name}|index"] = part.flat_positions()
            arrays[f"{spec.name}|bits"] = part.new
            arrays[f"{spec.name}|shape"] = np.array(spec.shape)
        await asyncio.to_thread(np.savez, self._patch, **arrays)
        try:
            await self._server.worker("benchmark_patch", os.fspath(self._patch))
        finally:
            self._patch.unlink()

    async def _ms(self, what: str, *args: object) -> float:
        return float((await self._server.worker(f"benchmark_{what}", *args))["ms"])

    def _row(self, times: Times, num_changed: int, written: dict[str, float]) -> Row:
        row: Row = {
            "density": float(f"{num_changed / self._weights.schema.num_elements:.4g}"),
            "num_changed": num_changed,
        }
        for name in ("stage", "pause", "reload", "nan_staged"):
            row[f"{name}_ms"] = round(statistics.median(getattr(times, name)), 2)
            row[f"{name}_best_ms"] = round(min(getattr(times, name)), 2)
        row["copied_share"] = round(written["dense_bytes"] / self._weights.schema.num_bytes, 3)
        row["turns"] = len(times.pause)
        row["nan_staged_chunk_mib"] = self._chunk >> 20
        return row
