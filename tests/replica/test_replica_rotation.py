"""The rotating proof: weights that change behind Stitch's back are found; commits come first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web
from replica_kit import DEADLINE_S, QUICK, TOKEN, engine_at, replica_of, until
from test_replica_life import publish_more

from stitch.engines.embedded.model import LoadedModel, load_model
from stitch.engines.embedded.server import ServerOptions, build_app
from stitch.engines.port import VerifyReport
from stitch.errors import EngineError, FatalReplicaError
from stitch.publish import Publisher
from stitch.replica import rotation
from stitch.replica.app import ReplicaApp
from stitch.replica.config import ReplicaConfig
from stitch.replica.hosts import AttachedHost
from stitch.replica.run import serve_until
from stitch.tensors import HostWeights, open_checkpoint
from stitch.testing.fake_engine import FakeEngine
from stitch.testing.published import PublishedRun
from stitch.testing.synthetic import adam_step
from stitch.testing.tiny import tiny_checkpoint
from stitch.types import ReplicaState

SOON = {"proof_interval_s": 0.001}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow one another at once, a few tensors each."""
    monkeypatch.setattr(rotation, "IDLE_PER_BUSY", 0)
    real = rotation.batches_of_names
    monkeypatch.setattr(rotation, "batches_of_names", lambda schema: real(schema, 1))


class Watched(FakeEngine):
    """Notes what it is asked to verify, and at which version."""

    def __init__(self, weights: HostWeights) -> None:
        super().__init__(weights)
        self.looks: list[tuple[int, tuple[str, ...]]] = []
        self.refusals = 0

    async def verify(self, names: Sequence[str] | None = None) -> VerifyReport:
        report = await super().verify(names)
        if names is not None and report.ref is not None:
            if self.refusals:
                self.refusals -= 1
                raise EngineError("not now")
            self.looks.append((report.ref.version, tuple(names)))
        return report


def watched(published: PublishedRun) -> Watched:
    return Watched(engine_at(published, 0).weights)


async def test_all_tensors_are_proven_in_turn_and_again_after_a_commit(
    published: PublishedRun,
) -> None:
    engine = watched(published)
    async with replica_of(published, engine, **SOON) as replica:
        await replica.serves(3)
        metrics = replica.app.metrics
        await until(lambda: metrics.proof_rounds.value() >= 2, "two rounds")
        names = [spec.name for spec in engine.weights.schema.tensors]
        seen = [names for _, names in engine.looks]
        assert seen[: 2 * len(names)] == [(name,) for name in [*names, *names]]
        assert {version for version, _ in engine.looks} == {3}
        await asyncio.to_thread(publish_more, published, 1)
        await replica.serves(4)
        rounds = metrics.proof_rounds.value()
        await until(lambda: metrics.proof_rounds.value() >= rounds + 2, "rounds of version 4")
        assert engine.looks[-1][0] == 4
        assert replica.app.status.state is ReplicaState.SERVING
        assert "stitch_proven_tensors_total" in metrics.text()


async def test_a_damaged_live_weight_ends_the_replica_which_says_where(
    published: PublishedRun,
) -> None:
    engine = watched(published)
    async with replica_of(published, engine, **SOON) as replica:
        await replica.serves(3)
        await until(lambda: replica.app.metrics.proof_rounds.value(), "a round")
        spec = engine.weights.schema.tensors[1]
        engine.weights.words(spec.name)[5] ^= 1
        error = await replica.failure()
        assert isinstance(error, FatalReplicaError)
        assert spec.name in str(error)
        status = replica.app.status
        assert (status.state, status.ready) == (ReplicaState.FAILED, False)


async def test_it_steps_aside_for_a_transaction(
    published: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = watched(published)
    async with replica_of(published, engine, **SOON) as replica:
        await replica.serves(3)
        await until(lambda: engine.looks, "a look")
        committer = replica.app._committer
        assert committer is not None
        verify, asked = committer.engine.verify, 0

        async def counted(names: Sequence[str] | None = None) -> VerifyReport:
            nonlocal asked
            asked += 1
            return await verify(names)

        # Counted here, not in the engine, which a question reaches when the lock may be taken.
        monkeypatch.setattr(committer.engine, "verify", counted)
        await until(lambda: asked, "the next look")
        async with committer.lock:
            before = asked
            passed = asyncio.Event()
            asyncio.get_running_loop().call_later(0.05, passed.set)
            await passed.wait()  # fifty intervals
            assert asked == before
        await until(lambda: asked > before, "a look after it")


async def test_one_refusal_is_borne_and_many_are_not(published: PublishedRun) -> None:
    engine = watched(published)
    async with replica_of(published, engine, **SOON) as replica:
        await replica.serves(3)
        engine.refusals = rotation.MAX_REFUSALS - 1
        await until(lambda: not engine.refusals, "the refusals")
        looks = len(engine.looks)
        await until(lambda: len(engine.looks) > looks, "the next look")
        engine.refusals = rotation.MAX_REFUSALS
        assert "cannot say what it holds" in str(await replica.failure())


async def test_it_can_be_switched_off(published: PublishedRun) -> None:
    engine = watched(published)
    async with replica_of(published, engine, proof_interval_s=0) as replica:
        await replica.serves(3)
        await asyncio.to_thread(publish_more, published, 1)
        await replica.serves(4)
        assert not engine.looks


def damage(loaded: LoadedModel, word: int) -> None:
    """Flip one bit of a live parameter, in the storage that answers are computed from."""
    with torch.no_grad():
        parameter = dict(loaded.model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
        parameter.view(torch.int16).view(-1)[word] ^= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_a_damaged_live_weight_of_the_embedded_engine_is_found(
    dtype: str, tmp_path: Path
) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    with open_checkpoint(model) as checkpoint:
        weights = HostWeights.load(checkpoint)
    with Publisher.start(tmp_path / "board", "r", model) as publisher:
        adam_step(weights, 0.01, seed=1)
        publisher.publish(weights).wait()
    loaded = load_model(model, dtype=dtype)
    runner = web.AppRunner(build_app(loaded, ServerOptions(model_name="tiny"), token=TOKEN))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    settings = {**QUICK, **SOON, "board": str(tmp_path / "board"), "model": model}
    attach = {"engine": "attach", "engine_url": url, "engine_token": TOKEN}
    host = AttachedHost(url, TOKEN, start_timeout_s=DEADLINE_S, call_timeout_s=DEADLINE_S)
    apps: asyncio.Queue[ReplicaApp] = asyncio.Queue()
    ended = asyncio.create_task(
        serve_until(
            ReplicaConfig(**settings, **attach),
            host,
            asyncio.Event(),
            lambda app, _: apps.put_nowait(app),
        )
    )
    try:
        app = await apps.get()
        await until(lambda: app.metrics.proof_rounds.value(), "a round")
        async with aiohttp.ClientSession(app.url) as client, client.get("/health") as health:
            assert health.status == 200
        damage(loaded, int(np.random.default_rng(0).integers(100)) * 2 + 1)
        with pytest.raises(FatalReplicaError, match=r"layers\.0\.mlp\.up_proj"):
            await asyncio.wait_for(ended, DEADLINE_S)
    finally:
        ended.cancel()
        await runner.cleanup()
