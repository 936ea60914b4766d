"""Serving applications in the tests' own event loop, and engines made of tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import web

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


def embedded_app(
    directory: Path, *, dtype: str = "bfloat16", view: str | None = None, **limits: Any
) -> web.Application:
    from stitch.engines.embedded.model import load_model
    from stitch.engines.embedded.server import ServerOptions, build_app

    loaded = load_model(directory, dtype=dtype, view=view)
    return build_app(loaded, ServerOptions(model_name="tiny", **limits), token=TOKEN)
