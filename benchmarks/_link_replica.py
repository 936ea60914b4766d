"""The far side of the link benchmark: a replica (the real sidecar) before an engine in memory.

    python -m benchmarks._link_replica NUMBER BOARD MODEL POLL_S FOLDER [CACHE]

Prints every version that its engine serves, with the time. Told a version by a line, it also
fetches that version's checkpoint as soon as the board has it, into the folder, and loads it into
memory.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from stitch.board import BlobCache, Run, open_board
from stitch.replica.app import ReplicaApp
from stitch.replica.config import ReplicaConfig
from stitch.replica.hosts import AttachedHost
from stitch.replica.run import run_fast, serve_until
from stitch.tensors import HostWeights, open_checkpoint
from stitch.testing.fake_engine import FakeEngine, fake_engine_app

TOKEN = "a token of the benchmark"
LOOK_S = 0.002


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


async def main() -> None:
    number, board, model, poll_s, folder = sys.argv[1:6]
    with open_checkpoint(Path(model)) as checkpoint:
        engine = FakeEngine(HostWeights.load(checkpoint))
    runner = web.AppRunner(fake_engine_app(engine, TOKEN), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = ReplicaConfig(
        board=board,
        model=Path(model),
        port=0,
        replica_id=f"replica-{number}",
        engine="attach",
        engine_url=engine_url,
        engine_token=TOKEN,
        poll_interval_s=float(poll_s),
        heartbeat_interval_s=5.0,
        proof_interval_s=0.0,
        scratch=Path(folder),
        cache=Path(sys.argv[6]) if sys.argv[6:] else None,
    )
    threading.Thread(target=fetch_checkpoints, args=(config,), daemon=True).start()
    host = AttachedHost(engine_url, TOKEN, start_timeout_s=60.0, call_timeout_s=600.0)
    watching: list[asyncio.Task[None]] = []

    def listening(app: ReplicaApp, port: int) -> None:
        watching.append(asyncio.create_task(watch(app)))

    await serve_until(config, host, asyncio.Event(), listening)


async def watch(app: ReplicaApp) -> None:
    """Say which version is served, as soon as it is."""
    served = None
    while True:
        if app.status.caught_up and app.status.applied != served:
            served = app.status.applied
            commits = [commit for commit in app.status.commits if commit.version == served]
            at_s = commits[-1].served_unix_s if commits else time.time()
            say(what="patch", version=served, at_s=at_s)
        await asyncio.sleep(LOOK_S)


def open_run(config: ReplicaConfig) -> Run:
    """As the replica opens it."""
    cache = config.cache and BlobCache(config.cache, max_bytes=config.cache_max_bytes)
    return open_board(config.board, cache=cache).open_run("r")


def fetch_checkpoints(config: ReplicaConfig) -> None:
    """Fetch the checkpoints whose versions come in, over the replica's cache if it has one."""
    run = None
    for line in sys.stdin:
        version = int(json.loads(line)["version"])
        run = run or open_run(config)
        while (anchor := run.anchor(version)) is None:
            time.sleep(config.poll_interval_s)
        assert config.scratch is not None
        folder = config.scratch / f"checkpoint-{version}"
        path = run.fetch_anchor(anchor, folder)
        with open_checkpoint(path) as checkpoint:
            HostWeights.load(checkpoint)
        say(what="checkpoint", version=version, at_s=time.time())
        shutil.rmtree(folder)


if __name__ == "__main__":
    run_fast(main())
