"""A replica killed with SIGKILL at each step: the engine stays old or new, the next one goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from replica_kit import DEADLINE_S, TOKEN, engine_at, served, until

from stitch.testing.fake_engine import FakeEngine
from stitch.testing.published import PublishedRun, digest_of

SCRIPT = Path(__file__).with_name("serve_process.py")


@contextlib.asynccontextmanager
async def serving(
    published: PublishedRun, engine_url: str, failpoint: str = ""
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        published.board.url,
        str(published.base),
        engine_url,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ
        | {
            "STITCH_FAILPOINT": failpoint,
            "STITCH_SERVE_ENGINE_TOKEN": TOKEN,
            "PYTHONPATH": str(SCRIPT.parent),
        },
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(DEADLINE_S):
                await process.wait()


def holds_what_its_label_says(engine: FakeEngine, published: PublishedRun) -> int:
    """The version that the engine serves; its words are exactly that version's."""
    version = engine.ref.version if engine.ref is not None else 0
    assert digest_of(engine.weights) == published.digests[version]
    return version


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("failpoint", "served_after"),
    [
        ("replica.fetched:2", 0),
        ("replica.decoded:2", 0),
        ("replica.staged", 0),
        ("replica.committing", 0),
        ("replica.committed", 3),
    ],
)
async def test_after_a_kill_it_is_old_or_new_and_a_new_replica_reaches_the_newest(
    published: PublishedRun, failpoint: str, served_after: int
) -> None:
    engine = engine_at(published, 0)
    async with served(engine) as url:
        async with serving(published, url, failpoint) as process, asyncio.timeout(DEADLINE_S):
            assert await process.wait() == -signal.SIGKILL
        assert holds_what_its_label_says(engine, published) == served_after
        async with serving(published, url) as process:
            assert process.stdout is not None
            address = (await process.stdout.readline()).decode().strip()
            await until(lambda: engine.ref is not None and engine.ref.version == 3)
            assert holds_what_its_label_says(engine, published) == 3
            async with aiohttp.ClientSession(address) as client:
                await until_served(client, 3)
                async with client.post("/verify") as got:
                    proof = await got.json()
                    assert (proof["version"], proof["equal"]) == (3, True)
            process.terminate()
            async with asyncio.timeout(DEADLINE_S):
                assert await process.wait() == 0
        assert published.run.heartbeats() == []


async def until_served(client: aiohttp.ClientSession, version: int) -> None:
    """Ask until the version constraint is met."""
    body = {"prompt": "p", "max_tokens": 1, "weight_version": {"min_version": version}}
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with client.post("/v1/completions", json=body) as got:
                if got.status == 200:
                    return
                assert got.status in (409, 503)
            await asyncio.sleep(0.02)
