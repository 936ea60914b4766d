"""Starting an engine as a child process, knowing when it is ready and why it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import aiohttp

from stitch.engines.wire import TOKEN_ENV
from stitch.errors import FatalReplicaError

_POLL_S = 0.05
_TAIL_BYTES = 4000


def new_token() -> str:
    """A fresh control token."""
    return secrets.token_urlsafe(32)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free right now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def embedded_command(
    model: str | Path,
    *,
    port: int,
    host: str = "127.0.0.1",
    served_model_name: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    max_slots: int = 16,
    max_len: int = 512,
    threads: int = 1,
    view: str = "bf16",
) -> list[str]:
    """The command line of an embedded engine, for EngineProcess."""
    command = [sys.executable, "-m", "stitch.engines.embedded", "--model", str(model)]
    command += ["--host", host, "--port", str(port), "--dtype", dtype, "--device", device]
    command += ["--max-slots", str(max_slots), "--max-len", str(max_len)]
    command += ["--threads", str(threads), "--view", view]
    if served_model_name is not None:
        command += ["--served-model-name", served_model_name]
    return command


class EngineProcess:
    """A running engine that is killed when this process, or the thread that started it, ends."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        base_url: str,
        token: str,
        log: BinaryIO,
        *,
        least_grace_s: float = 0.0,
    ) -> None:
        self._process = process
        self._log = log
        self._least_grace_s = least_grace_s
        self.base_url = base_url
        self.token = token

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        base_url: str,
        token: str | None = None,
        env: Mapping[str, str] | None = None,
        health_path: str = "/health",
        ready_timeout_s: float = 300.0,
        log_path: str | Path | None = None,
        plugin: bool = True,
        least_grace_s: float = 0.0,
    ) -> EngineProcess:
        """Run `command` and return once `base_url + health_path` answers 200.

        `env` is added to this process's environment, with the control token; without `plugin` it
        gets no token, so that a plugin of ours stays idle. It always has `least_grace_s` to end in
        order. Output goes to `log_path`, or to a temporary file whose end is shown when the engine
        fails. Raises FatalReplicaError when it exits or is not ready in time; then it is no longer
        running.
        """
        secret = token or new_token()
        environment = {**os.environ, **(env or {})}
        environment.pop(TOKEN_ENV, None)
        if plugin:
            environment[TOKEN_ENV] = secret
        log = _open_log(log_path)
        tether = [sys.executable, "-m", "stitch.engines.tether", str(os.getpid()), "--"]
        try:
            process = await asyncio.create_subprocess_exec(
                *tether,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        except OSError:
            log.close()
            raise
        engine = cls(process, base_url.rstrip("/"), secret, log, least_grace_s=least_grace_s)
        try:
            await engine._ready(health_path, ready_timeout_s)
        except BaseException:
            await engine.stop(grace_s=0)
            raise
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end and return the exit status."""
        return await self._process.wait()

    async def stop(self, grace_s: float = 5.0) -> int:
        """End it: SIGTERM, and SIGKILL after `grace_s`. Returns the exit status."""
        grace_s = max(grace_s, self._least_grace_s)
        if self._process.returncode is None and grace_s > 0:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        if self._process.returncode is None:
            self._process.kill()
        status = await self._process.wait()
        self._log.close()
        return status

    def log_tail(self) -> str:
        """The last lines of its output."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        # pread leaves the offset alone, which the child shares.
        data = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return data.decode("utf-8", "replace").strip()

    async def _ready(self, health_path: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        limit = aiohttp.ClientTimeout(total=2.0)
        async with aiohttp.ClientSession(timeout=limit) as session:
            while not await _answers(session, self.base_url + health_path):
                if self.returncode is not None:
                    raise FatalReplicaError(
                        f"the engine exited with status {self.returncode} before it was ready:\n"
                        f"{self.log_tail()}"
                    )
                if time.monotonic() > deadline:
                    raise FatalReplicaError(
                        f"the engine was not ready after {timeout_s:g} s:\n{self.log_tail()}"
                    )
                await asyncio.sleep(_POLL_S)


def _open_log(path: str | Path | None) -> BinaryIO:
    """Where an engine's output goes; the child inherits it, so nobody has to drain a pipe."""
    if path is None:
        return cast(BinaryIO, tempfile.TemporaryFile())
    return open(path, "a+b")


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
