"""Where the engine runs: a child process that the replica starts, or one that is there already."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from stitch.board import Run
from stitch.engines.control import ControlClient
from stitch.engines.launch import EngineProcess, embedded_command, free_port, new_token
from stitch.engines.plugin_launch import plugin_environment
from stitch.engines.port import Engine
from stitch.engines.sglang.launch import sglang_command
from stitch.engines.vllm.launch import vllm_command
from stitch.errors import EngineUnreachableError, FatalReplicaError
from stitch.replica.config import ReplicaConfig
from stitch.types import Schema

log = logging.getLogger("stitch.replica")

_RETRY_S = 0.2
DEFAULT_VIEW = "bf16"


class EngineHost(Protocol):
    """Gives the replica its engine."""

    base_url: str

    async def begin(self) -> None:
        """Start what can start before the run is known."""
        ...

    async def ready(self, run: Run) -> Engine:
        """The engine, answering and holding the run's view; raises FatalReplicaError."""
        ...

    async def watch(self) -> None:
        """Raise FatalReplicaError when the engine's end is seen."""
        ...

    async def stop(self) -> None:
        """End what was started here."""
        ...


class AttachedHost:
    """A running engine that somebody else looks after."""

    def __init__(self, base_url: str, token: str, *, start_timeout_s: float, call_timeout_s: float):
        self.base_url = base_url.rstrip("/")
        self._token = token
        self._start_timeout_s = start_timeout_s
        self._call_timeout_s = call_timeout_s

    async def begin(self) -> None:
        return None

    async def ready(self, run: Run) -> Engine:
        engine = connect(self.base_url, self._token, run.schema, self._call_timeout_s)
        try:
            await answering(engine, self._start_timeout_s)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def watch(self) -> None:
        await asyncio.Event().wait()  # the watchdog asks it

    async def stop(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How an engine is started: its command line and what is added to the environment."""

    command: list[str]
    env: Mapping[str, str] = field(default_factory=dict)


def _launch_embedded(config: ReplicaConfig, port: int, view: str) -> Launch:
    command = embedded_command(
        config.model,
        port=port,
        served_model_name=config.served_model_name,
        dtype=config.dtype,
        device=config.device,
        max_slots=config.max_slots,
        max_len=config.max_len,
        threads=config.threads,
        view=view,
    )
    return Launch(command=[*command, *config.engine_args])


def _launch_plugin(
    command_of: Callable[..., list[str]], config: ReplicaConfig, port: int, view: str
) -> Launch:
    command = command_of(
        config.model,
        port=port,
        served_model_name=config.served_model_name,
        python=config.engine_python,
        view=view,
        args=config.engine_args,
    )
    return Launch(command=command, env=plugin_environment(view))


LAUNCHERS: Mapping[str, Callable[[ReplicaConfig, int, str], Launch]] = {
    "embedded": _launch_embedded,
    "vllm": partial(_launch_plugin, vllm_command),
    "sglang": partial(_launch_plugin, sglang_command),
}
"""Engines that a replica can start -> how, from its settings, a port and the run's view."""


class StartedHost:
    """An engine as a child process; it dies with the replica."""

    def __init__(self, config: ReplicaConfig) -> None:
        self._config = config
        self._launch = LAUNCHERS[config.engine]
        self._port = config.engine_port or free_port()
        self.base_url = f"http://127.0.0.1:{self._port}"
        self._token = new_token()
        self._view = DEFAULT_VIEW
        self._starting: asyncio.Task[EngineProcess] | None = None

    async def begin(self) -> None:
        """Loading takes long: it starts with the usual view before the run is known."""
        self._starting = asyncio.create_task(self._start(self._view))

    async def ready(self, run: Run) -> Engine:
        if run.record.view != self._view:
            log.info("event=engine_restart view=%s was=%s", run.record.view, self._view)
            await self.stop()
            self._view = run.record.view
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(self._view))
        await self._starting
        engine = connect(self.base_url, self._token, run.schema, self._config.engine_timeout_s)
        await answering(engine, self._config.engine_start_timeout_s)
        return engine

    async def watch(self) -> None:
        if self._starting is None:
            return
        process = await self._starting
        status = await process.wait()
        raise FatalReplicaError(
            f"the engine process ended with status {status}:\n{process.log_tail()}"
        )

    async def stop(self) -> None:
        starting, self._starting = self._starting, None
        if starting is None:
            return
        if not starting.done():
            starting.cancel()
        outcome = (await asyncio.gather(starting, return_exceptions=True))[0]
        if isinstance(outcome, EngineProcess):
            await outcome.stop()

    async def _start(self, view: str) -> EngineProcess:
        launch = self._launch(self._config, self._port, view)
        return await EngineProcess.start(
            launch.command,
            base_url=self.base_url,
            token=self._token,
            env=launch.env,
            ready_timeout_s=self._config.engine_start_timeout_s,
        )


def host_for(config: ReplicaConfig) -> EngineHost:
    if config.reloads:
        from stitch.replica.reload_host import ReloadHost

        return ReloadHost(config)
    if config.engine in LAUNCHERS:
        return StartedHost(config)
    assert config.engine_url is not None
    assert config.engine_token is not None
    return AttachedHost(
        config.engine_url,
        config.engine_token,
        start_timeout_s=config.engine_start_timeout_s,
        call_timeout_s=config.engine_timeout_s,
    )


def connect(base_url: str, token: str, schema: Schema, timeout_s: float) -> ControlClient:
    return ControlClient(base_url, token, schema=schema, timeout_s=timeout_s)


async def answering(engine: Engine, budget_s: float) -> None:
    """Wait until the engine describes itself; FatalReplicaError after `budget_s`."""
    deadline_s = time.monotonic() + budget_s
    while True:
        try:
            await engine.describe()
            return
        except EngineUnreachableError as error:
            if time.monotonic() > deadline_s:
                raise FatalReplicaError(
                    f"the engine did not answer within {budget_s:g} s: {error}"
                ) from error
        await asyncio.sleep(_RETRY_S)
