"""`stitch serve --engine`: a replica that starts an engine and keeps it on the newest version."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
from equality import checkout
from real_kit import (
    PROMPTS,
    QUIET,
    START_S,
    RealEngine,
    digest_of,
    name_of,
    wait_for_the_end_of,
)
from real_models import load, make_model, real_change

from stitch.board import open_board
from stitch.engines.group.ending import descendants
from stitch.publish import Publisher
from stitch.tensors import HostWeights

DEADLINE_S = 60.0


@dataclass
class Replica:
    url: str
    session: aiohttp.ClientSession
    process: asyncio.subprocess.Process

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            return await response.json()

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def serves(self, version: int, deadline_s: float = DEADLINE_S) -> None:
        async with asyncio.timeout(deadline_s):
            while True:
                info = await self.get("/server_info")
                if (info["state"], info["applied"]) == ("SERVING", version):
                    return
                assert self.process.returncode is None, info
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def serving(
    engine: type[RealEngine],
    board: Path,
    model: Path,
    errors: Path,
    *,
    flags: Sequence[str] = (),
    args: Sequence[str] | None = None,
    **env: str,
) -> AsyncIterator[Replica]:
    """A replica; `flags` are further ones of its own, `args` the engine's (None: the usual)."""
    command = [sys.executable, "-m", "stitch.cli", "serve", "--json", "--board", str(board)]
    command += ["--model", str(model), "--port", "0", "--poll-interval", "0.2", "--run", "r"]
    command += ["--engine", engine.name, "--engine-python", engine.python()]
    command += ["--served-model-name", "tiny", *flags]
    command += ["--", *(engine.args if args is None else args)]
    with errors.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **QUIET, **engine.env, **env},
        )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        assert line, "the replica ended before it listened"
        async with aiohttp.ClientSession() as session:
            yield Replica(json.loads(line)["url"], session, process)
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            await process.wait()


def request(num_tokens: int, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": num_tokens, "temperature": 0}
    return {**body, "ignore_eos": True, **more}


def publish(publisher: Publisher, weights: HostWeights, version: int) -> None:
    real_change(weights, seed=version).apply(weights)
    publisher.publish(weights, step=version).wait()


async def spans_a_commit(replica: Replica, publisher: Publisher, weights: HostWeights) -> None:
    """A stream that is under way while version 3 is committed says from where to where."""
    events: list[Any] = []
    stream = replica.session.post(f"{replica.url}/v1/completions", json=request(400, stream=True))
    async with stream as response:
        assert response.status == 200
        publishing: asyncio.Task[None] | None = None
        async for line in response.content:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
            if publishing is None:
                publishing = asyncio.create_task(asyncio.to_thread(publish, publisher, weights, 3))
        assert publishing is not None
        await publishing
    stamp = next(event for event in events if event.get("object") == "stitch.versions")
    assert stamp["weight_version_start"] == 2
    assert stamp["weight_version_end"] in (2, 3)
    await replica.serves(3)


async def outlives_a_bad_blob(
    replica: Replica, publisher: Publisher, weights: HostWeights, board: Path
) -> None:
    """Version 3 is served while version 4 is damaged, and version 4 once it is whole."""
    digest = digest_of(weights)
    before = await tokens(replica, PROMPTS[0])
    replica.process.send_signal(signal.SIGSTOP)  # until the damage is done
    try:
        await asyncio.to_thread(publish, publisher, weights, 4)
        (blob,) = (board / "r" / "v" / f"{4:08d}").glob("*.patch")
        whole = blob.read_bytes()
        blob.chmod(0o644)
        blob.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    finally:
        replica.process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            info = await replica.get("/server_info")
            if "CorruptBlobError" in info["blocked"]:
                break
            await asyncio.sleep(0.1)
    assert (info["applied"], "version 4" in info["blocked"]) == (3, True)
    status, report = await replica.post("/verify", {})
    assert (status, report["digest"]) == (200, digest)
    assert await tokens(replica, PROMPTS[0]) == before
    blob.write_bytes(whole)
    await replica.serves(4)
    status, report = await replica.post("/verify", {})
    assert (status, report["digest"]) == (200, digest_of(weights))


async def tokens(replica: Replica, prompt: Sequence[int]) -> list[int]:
    """Greedy tokens, as `RealEngine.tokens` asks for them."""
    body = request(24, prompt=list(prompt), return_token_ids=True)
    status, answer = await replica.post("/v1/completions", body)
    assert status == 200, answer
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


async def loses_its_engine(replica: Replica, core_name: str) -> None:
    below = descendants(replica.process.pid)
    (core,) = (pid for pid in below if name_of(pid).startswith(core_name))
    os.kill(core, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        assert await replica.process.wait() == 4
    wait_for_the_end_of(below)


class Served:
    engine: ClassVar[type[RealEngine]]

    async def test_a_replica_starts_it_follows_the_board_and_ends_with_it(
        self, tmp_path: Path
    ) -> None:
        model = make_model("tied", tmp_path / "model")
        weights = load(model)
        errors = tmp_path / "errors"
        with Publisher.start(open_board(tmp_path / "board"), "r", model, threads=1) as publisher:
            for version in (1, 2):
                await asyncio.to_thread(publish, publisher, weights, version)
            async with serving(self.engine, tmp_path / "board", model, errors) as replica:
                await replica.serves(2, START_S)
                status, answer = await replica.post("/v1/completions", request(4))
                assert status == 200, answer
                assert (answer["weight_version_start"], answer["weight_version_end"]) == (2, 2)
                status, report = await replica.post("/verify", {})
                assert (status, report["digest"]) == (200, digest_of(weights))
                await spans_a_commit(replica, publisher, weights)
                for path in ("/stitch/v1/describe", "/invocations", *self.engine.control):
                    assert (await replica.post(path, {}))[0] == 403
                answers = [await tokens(replica, prompt) for prompt in PROMPTS]
                await outlives_a_bad_blob(replica, publisher, weights, tmp_path / "board")
                await loses_its_engine(replica, self.engine.core)
            assert "the engine" in errors.read_text()
        fresh = self.engine(await checkout(tmp_path / "board", "r", 3, model), tmp_path / "log")
        try:
            assert [fresh.tokens(prompt) for prompt in PROMPTS] == answers
        finally:
            fresh.stop()

    async def test_killed_in_a_pause_it_ends_and_started_again_serves_the_new_version(
        self, tmp_path: Path
    ) -> None:
        board, model = tmp_path / "board", make_model("untied", tmp_path / "model")
        weights, errors = load(model), tmp_path / "errors"
        with Publisher.start(open_board(board), "r", model, threads=1) as publisher:
            await asyncio.to_thread(publish, publisher, weights, 1)
            dies = {"STITCH_FAILPOINT": "engine.written:2"}
            async with serving(self.engine, board, model, errors, **dies) as replica:
                await replica.serves(1, START_S)
                below = descendants(replica.process.pid)
                await asyncio.to_thread(publish, publisher, weights, 2)
                async with asyncio.timeout(DEADLINE_S):
                    assert await replica.process.wait() == 4
                wait_for_the_end_of(below)
            assert "the engine process ended with status -9" in errors.read_text()
            async with serving(self.engine, board, model, errors) as replica:
                await replica.serves(2, START_S)
                status, report = await replica.post("/verify", {})
                assert (status, report["digest"]) == (200, digest_of(weights))

    @pytest.mark.parametrize("problem", ["no engine there", "its own argument"])
    async def test_an_engine_that_cannot_start_is_said(self, problem: str, tmp_path: Path) -> None:
        model = make_model("tied", tmp_path / "model")
        command = [sys.executable, "-m", "stitch.cli", "serve", "--board", str(tmp_path / "board")]
        command += ["--model", str(model), "--port", "0", "--engine", self.engine.name]
        if problem == "its own argument":
            command += ["--engine-python", self.engine.python(), "--", "--no-such-flag"]
        with Publisher.start(open_board(tmp_path / "board"), "r", model, threads=1):
            process = await asyncio.create_subprocess_exec(
                *command,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **QUIET, **self.engine.env},
            )
            async with asyncio.timeout(START_S):
                _, errors = await process.communicate()
        assert process.returncode == 4
        said = (
            "no-such-flag"
            if problem == "its own argument"
            else f"No module named '{self.engine.name}"
        )
        assert said in errors.decode()
