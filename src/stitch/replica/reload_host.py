"""A stock engine, started here or running already, that is changed by reloading checkpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from stitch.board import Run
from stitch.engines.launch import EngineProcess, free_port
from stitch.engines.port import Engine
from stitch.engines.reload.engine import ReloadEngine
from stitch.engines.reload.generations import Generations
from stitch.engines.reload.launch import stock_command, stock_environment
from stitch.engines.reload.sglang import StockSglang
from stitch.engines.reload.stock import StockEngine
from stitch.engines.reload.vllm import StockVllm
from stitch.errors import EngineUnreachableError, FatalReplicaError
from stitch.replica.config import ReplicaConfig

log = logging.getLogger("stitch.replica")

_RETRY_S = 0.2
_GRACE_S = 30.0
"""An engine has half of it to end in order; then its keeper ends all of its processes."""

STOCK: Mapping[str, Callable[..., StockEngine]] = {"vllm": StockVllm, "sglang": StockSglang}


class ReloadHost:
    """Implements EngineHost. Checkpoints are kept in `config.engine_dir`."""

    def __init__(self, config: ReplicaConfig) -> None:
        self._config = config
        self._port = config.engine_port or free_port()
        url = config.engine_url or f"http://127.0.0.1:{self._port}"
        self.base_url = url.rstrip("/")
        self._process: EngineProcess | None = None

    async def begin(self) -> None:
        """What the engine loads depends on the run."""

    async def ready(self, run: Run) -> Engine:
        config = self._config
        assert config.engine_dir is not None
        generations = await asyncio.to_thread(
            Generations.open,
            config.engine_dir,
            config.model,
            run.record.view,
            run=run.name,
            threads=config.threads,
        )
        log.info(
            "event=generation_current path=%s ref=%s",
            generations.current.path, generations.current.ref,
        )  # fmt: skip
        stock = STOCK[config.engine](
            self.base_url, token=config.engine_token, timeout_s=config.engine_timeout_s
        )
        try:
            if config.engine_url is None:
                self._process = await self._start(generations, run.record.view)
            fresh = self._process is not None
            return await self._opened(stock, generations, fresh=fresh)
        except BaseException:
            await stock.close()
            generations.close()
            raise

    async def watch(self) -> None:
        if self._process is None:
            await asyncio.Event().wait()  # the watchdog asks it
            return
        status = await self._process.wait()
        raise FatalReplicaError(
            f"the engine process ended with status {status}:\n{self._process.log_tail()}"
        )

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()

    async def _start(self, generations: Generations, view: str) -> EngineProcess:
        config = self._config
        command = stock_command(
            config.engine,
            generations.link,
            port=self._port,
            served_model_name=config.served_model_name or str(config.model),
            python=config.engine_python,
            view=view,
            args=config.engine_args,
        )
        return await EngineProcess.start(
            command,
            base_url=self.base_url,
            env=stock_environment(config.engine),
            ready_timeout_s=config.engine_start_timeout_s,
            plugin=False,
            least_grace_s=_GRACE_S,
        )

    async def _opened(
        self, stock: StockEngine, generations: Generations, *, fresh: bool
    ) -> ReloadEngine:
        """One that runs already may still be loading."""
        deadline_s = time.monotonic() + self._config.engine_start_timeout_s
        while True:
            try:
                return await ReloadEngine.opened(stock, generations, fresh=fresh)
            except EngineUnreachableError as error:
                if time.monotonic() > deadline_s:
                    raise FatalReplicaError(
                        f"no stock engine answered at {self.base_url} within "
                        f"{self._config.engine_start_timeout_s:g} s: {error}"
                    ) from error
            await asyncio.sleep(_RETRY_S)
