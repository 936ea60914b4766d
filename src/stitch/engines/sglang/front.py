"""The front of the plugin, in SGLang's server process: the control interface, and what it closes.

It stands before everything else in SGLang's application: before its keys, as the control interface
has a token of its own, and before its routes, some of which would change weights or caches behind
our back.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from stitch.engines import wire
from stitch.engines.group.control_asgi import ControlAsgi, Receive, Scope, Send, send_json
from stitch.engines.group.ending import end_engine
from stitch.engines.group.engine import GroupTraits
from stitch.engines.group.front import log_to_stderr, start_front
from stitch.engines.sglang import SOCKETS_ENV
from stitch.engines.sglang.stamping import ROUTES, noting, stamping
from stitch.engines.sglang.workers import SglangWorkers
from stitch.errors import UsageError

_log = logging.getLogger(__name__)

Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

HARMLESS_ADMIN = frozenset({"/freeze_gc"})
"""Control routes that stay open; the server asks itself for this one."""
CLOSED = frozenset({
    "/pause_generation", "/continue_generation", "/flush_cache", "/update_weights_from_disk",
    "/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_ipc",
    "/begin_weight_update", "/end_weight_update", "/update_weight_version",
    "/release_memory_occupation", "/resume_memory_occupation", "/scale_elastic_ep",
    "/open_session", "/close_session",
})  # fmt: skip
"""Closed whatever SGLang counts them as. A session keeps keys and values that nothing empties."""
PASS_BY = (
    "/stitch/*", "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/freeze_gc",
    "/invocations", "/vertex_generate", "/api/*", "/v1/decisions", "/v1/systemone", "/v1/realtime",
    "/v1/tokenize", "/v1/detokenize", "/tokenize", "/detokenize", "/encode", "/classify",
    "/get_hicache_l3_cache_layout", "/v1/loads", "/parse_function_call", "/separate_reasoning",
)  # fmt: skip
"""Kept from outside by the replica alone: they tell too much, or pass by the salt."""

ONE_ENGINE = "one writer, one engine: start one SGLang for each replica instead of {name}"
REFUSED = {
    "tokenizer_worker_num": (1, ONE_ENGINE),
    "dp_size": (1, ONE_ENGINE),
    "nnodes": (1, ONE_ENGINE),
    "pp_size": (1, "stages of a pipeline do not pause together: leave out {name}"),
    "disaggregation_mode": ("null", "leave out {name}: weights there and here change apart"),
    "enable_hierarchical_cache": (False, "leave out {name}: it keeps what a pause cannot drop"),
    "enable_lmcache": (False, "leave out {name}: it keeps what a pause cannot drop"),
    "enable_lora": (False, "weights under LoRA adapters are not changed in place: leave out LoRA"),
    "enable_eplb": (False, "experts that move cannot be followed: leave out {name}"),
    "elastic_ep_backend": (None, "experts that move cannot be followed: leave out {name}"),
    "cpu_offload_gb": (0, "weights that move cannot be followed: leave out {name}"),
    "weight_cache_mode": ("off", "the weights of {name} belong to several engines"),
    "enable_http2": (False, "leave out {name}: another server than the one with our interface"),
    "grpc_port": (None, "leave out {name}: another server than the one with our interface"),
}  # fmt: skip
"""Option -> (the value that it must have, why)."""


def run_with_control(
    run: Callable[..., None], server_args: Any, manager: Any, *args: Any, **kwargs: Any
) -> None:
    """Instead of SGLang's `_setup_and_run_http_server`: the same, behind our front."""
    from sglang.srt.entrypoints.http_server import app

    log_to_stderr()
    check_setup(_option)
    front = Front(os.environ.get(wire.TOKEN_ENV, ""), control_routes(app.routes))
    front.stand_before(app, manager)
    run(server_args, manager, *args, **kwargs)


def _option(name: str) -> Any:
    """The value in effect; None for an option that this SGLang does not have."""
    from sglang.srt.runtime_context import get_context

    try:
        return get_context().config_leaf(name)
    except ValueError:
        return None


def check_setup(value_of: Callable[[str], Any]) -> None:
    """Raise UsageError for options under which weights cannot be changed in place."""
    for name, (wanted, why) in REFUSED.items():
        if (value_of(name) or wanted or None) != (wanted or None):
            raise UsageError(why.format(name="--" + name.replace("_", "-")))


def control_routes(routes: Iterable[Any]) -> frozenset[str]:
    """Paths that are closed: of the routes that SGLang itself counts as control, and CLOSED."""
    found = {
        path
        for path, endpoint in _endpoints(routes)
        if getattr(endpoint, "_auth_level", "normal") != "normal"  # an enumeration of texts
    }
    return frozenset(found - HARMLESS_ADMIN) | CLOSED


def _endpoints(routes: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, endpoint) of all routes, with those of routers that were included whole."""
    for route in routes:
        router = getattr(route, "original_router", None)
        if router is not None:
            yield from _endpoints(router.routes, prefix + route.include_context.prefix)
        elif hasattr(route, "endpoint"):
            yield prefix + route.path, route.endpoint


class Front:
    """The control interface and closed doors before an application."""

    def __init__(self, token: str, closed: frozenset[str]) -> None:
        if not token:
            raise UsageError(f"set {wire.TOKEN_ENV} to the control token")
        self._control = ControlAsgi(token)
        self._closed = closed

    def stand_before(self, app: Any, manager: Any) -> None:
        """Take requests first, and learn before SGLang takes any."""
        manager.generate_request = noting(manager.generate_request)
        build, lifespan = app.build_middleware_stack, app.router.lifespan_context
        app.build_middleware_stack = lambda: self.before(build())

        @contextlib.asynccontextmanager
        async def learned(application: Any) -> AsyncIterator[Any]:
            await self._start(manager)
            async with lifespan(application) as state:
                yield state

        app.router.lifespan_context = learned

    def before(self, inner: Asgi) -> Asgi:
        """The application with us before it."""
        json = importlib.import_module("orjson")  # SGLang's own; answers may have megabytes

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await inner(scope, receive, send)
            path: str = scope["path"].removeprefix(scope.get("root_path", ""))
            if path.startswith(wire.PREFIX + "/"):
                return await self._control(scope, receive, send)
            if path in self._closed:
                message = f"weights and caches are changed through {wire.PREFIX} only"
                error = {"error": {"type": "Forbidden", "message": message, "code": 403}}
                return await send_json(send, 403, error)
            if path in ROUTES and scope["method"] == "POST":
                send = stamping(scope, send, json.loads, json.dumps)
            await inner(scope, receive, send)

        return answer

    async def _start(self, manager: Any) -> None:
        """Learn where every tensor lives; what fails ends the engine."""
        try:
            await self._learn(manager)
        except Exception as error:  # SGLang would end orderly, as if all were well
            _log.exception("event=no_start")
            shutil.rmtree(os.environ[SOCKETS_ENV], ignore_errors=True)
            end_engine(f"the weights could not be learned: {error!r}")

    async def _learn(self, manager: Any) -> None:
        from sglang.srt.managers import io_struct

        manager.auto_create_handle_loop()
        workers = await SglangWorkers.connected(
            manager, io_struct, Path(os.environ[SOCKETS_ENV]), _option("tp_size")
        )
        directory = Path(manager.config_value("model_path"))
        traits = GroupTraits(
            engine="sglang",
            stamps_versions=True,
            salt_field="extra_key",
            blocked_routes=(*PASS_BY, *sorted(self._closed)),
        )
        view = os.environ.get(wire.VIEW_ENV, "bf16")
        self._control.serve(*await start_front(workers, directory, view, traits))
