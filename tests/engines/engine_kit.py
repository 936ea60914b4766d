"""Serving applications in the tests' own event loop, and engines made of tiny models."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from stitch.engines.embedded.model import LoadedModel, load_model
from stitch.engines.embedded.server import ServerOptions, build_app

TOKEN = "a control token for tests"


class Served:
    """`async with Served(app) as url`: the application on a free loopback port."""

    def __init__(self, app: web.Application) -> None:
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


async def until(condition: Callable[[], Awaitable[bool]], deadline_s: float = 60.0) -> None:
    """Wait for a condition that only asking can tell."""
    async with asyncio.timeout(deadline_s):
        while not await condition():  # noqa: ASYNC110 - it holds in another process or thread
            await asyncio.sleep(0.005)


class PacedModel(LoadedModel):
    """A tiny model whose steps take as long as a larger one's, so that tests can act meanwhile.

    Nor does a step begin before the test's event loop has turned: however slowly that goes, what
    takes a test some hundred turns happens within as many tokens.
    """

    aio: asyncio.AbstractEventLoop

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.004)
        turned = threading.Event()
        with contextlib.suppress(RuntimeError):  # the test is over, the loop is closed
            self.aio.call_soon_threadsafe(turned.set)
            turned.wait(60)
        return super().forward(*args, **kwargs)


def embedded_app(
    directory: Path,
    *,
    dtype: str = "float32",
    view: str = "bf16",
    paced: bool = False,
    **limits: Any,
) -> web.Application:
    loaded = load_model(directory, dtype=dtype, view=view)
    if paced:
        parts = {field.name: getattr(loaded, field.name) for field in dataclasses.fields(loaded)}
        loaded = PacedModel(**parts)
        object.__setattr__(loaded, "aio", asyncio.get_running_loop())
    return build_app(loaded, ServerOptions(model_name="tiny", **limits), token=TOKEN)
