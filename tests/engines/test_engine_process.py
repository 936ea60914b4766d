"""Engines as child processes: start-up, failure to start, and never outliving their parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from engine_kit import until

from stitch.codec import DigestState
from stitch.engines.control import ControlClient
from stitch.engines.launch import EngineProcess, embedded_command, free_port
from stitch.errors import FatalReplicaError
from stitch.tensors import HostWeights, open_checkpoint
from stitch.testing.engine_contract import BASE, NEXT, flip_update
from stitch.testing.tiny import tiny_checkpoint

STAND_IN = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
print("token", os.environ["STITCH_ENGINE_TOKEN"], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def stand_in(port: int) -> list[str]:
    """The command of a process that is healthy at once."""
    return [sys.executable, "-c", STAND_IN, str(port)]


def running(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it goes while it is read
        return False
    return state not in "ZX"


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def test_the_embedded_engine_serves_from_its_own_process(tiny: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = embedded_command(tiny, port=port, served_model_name="tiny")
    engine = await EngineProcess.start(command, base_url=url)
    try:
        assert engine.token not in command_line(engine.pid)
        with open_checkpoint(tiny) as checkpoint:
            weights = HostWeights.load(checkpoint)
        control = ControlClient(url, engine.token, schema=weights.schema)
        await control.bind(BASE, DigestState.of(weights).version_digest())
        update = flip_update(weights, 1)
        await control.stage("a", BASE, NEXT, update)
        receipt = await control.commit("a")
        update.apply(weights)
        report = await control.verify()
        await control.close()
        assert receipt.pause_ms > 0
        assert report.digest == DigestState.of(weights).version_digest()
        async with aiohttp.ClientSession() as session:
            body = {"prompt": "1+1=", "max_tokens": 3}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert (await response.json())["weight_version_end"] == 1
    finally:
        await engine.stop()
    assert not running(engine.pid)


async def test_why_an_engine_did_not_start_is_told(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"sliding_window": 8}))
    port = free_port()
    with pytest.raises(FatalReplicaError, match="sliding window of 8 tokens"):
        await EngineProcess.start(
            embedded_command(directory, port=port), base_url=f"http://127.0.0.1:{port}"
        )


async def test_a_command_that_cannot_be_run_is_named() -> None:
    with pytest.raises(FatalReplicaError, match="no-such-program"):
        await EngineProcess.start(["no-such-program"], base_url="http://127.0.0.1:9")


async def test_an_engine_that_is_not_ready_in_time_is_ended() -> None:
    command = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"]
    with pytest.raises(FatalReplicaError, match=r"not ready after 2 s"):
        await EngineProcess.start(command, base_url="http://127.0.0.1:9", ready_timeout_s=2)


async def test_the_end_of_an_engine_is_noticed_with_its_status(tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "engine.log"
    url = f"http://127.0.0.1:{port}"
    engine = await EngineProcess.start(stand_in(port), base_url=url, log_path=log)
    os.kill(engine.pid, signal.SIGKILL)
    assert await engine.wait() == -signal.SIGKILL
    assert f"token {engine.token}" in engine.log_tail()
    assert await engine.stop() == -signal.SIGKILL
    assert log.read_text().startswith("token ")


PARENT = """
import asyncio, sys
from stitch.engines.launch import EngineProcess
async def main():
    port = sys.argv[1]
    engine = await EngineProcess.start(sys.argv[2:], base_url=f"http://127.0.0.1:{port}")
    print(engine.pid, flush=True)
    await engine.wait()
asyncio.run(main())
"""


async def test_an_engine_dies_with_its_parent() -> None:
    port = free_port()
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PARENT,
        str(port),
        *stand_in(port),
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert running(pid)
    parent.kill()
    await parent.wait()

    async def gone() -> bool:
        return not running(pid)

    await until(gone)
