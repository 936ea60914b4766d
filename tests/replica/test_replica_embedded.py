"""A replica that starts the embedded engine itself: the real thing, tiny."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from replica_kit import QUICK, until

from stitch.errors import FatalReplicaError
from stitch.publish import Publisher
from stitch.replica.app import ReplicaApp
from stitch.replica.config import ReplicaConfig
from stitch.replica.hosts import StartedHost
from stitch.replica.run import serve_until
from stitch.tensors import HostWeights, open_checkpoint
from stitch.testing.published import digest_of
from stitch.testing.synthetic import adam_step
from stitch.testing.tiny import tiny_checkpoint


@pytest.mark.slow
async def test_it_serves_the_newest_version_and_fails_loudly_when_the_engine_is_killed(
    tmp_path: Path,
) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    with open_checkpoint(model) as checkpoint:
        weights = HostWeights.load(checkpoint)
    with Publisher.start(tmp_path / "board", "r", model) as publisher:
        for seed in range(2):
            adam_step(weights, 0.01, seed=seed)
            publisher.publish(weights).wait()
    settings = QUICK | {"board": str(tmp_path / "board"), "model": model}
    config = ReplicaConfig(**(settings | {"engine_start_timeout_s": 90.0}))
    host, stop = StartedHost(config), asyncio.Event()
    apps: asyncio.Queue[ReplicaApp] = asyncio.Queue()
    ended = asyncio.create_task(
        serve_until(config, host, stop, lambda app, _: apps.put_nowait(app))
    )
    app = await apps.get()
    async with asyncio.timeout(90), aiohttp.ClientSession(app.url) as client:
        while not app.status.ready:
            assert not ended.done()
            await asyncio.sleep(0.05)
        body = {"prompt": "hi", "max_tokens": 3, "weight_version": {"exact_version": 2}}
        async with client.post("/v1/completions", json=body) as got:
            answer = await got.json()
            assert (answer["weight_version_start"], answer["weight_version_end"]) == (2, 2)
        async with client.post("/verify") as got:
            proof = await got.json()
            assert proof["digest"] == proof["board_digest"] == digest_of(weights)
        assert host._starting is not None
        os.kill(host._starting.result().pid, signal.SIGKILL)
        with pytest.raises(FatalReplicaError, match="status -9"):
            await ended
    await until(lambda: app.status.state.value == "FAILED")
