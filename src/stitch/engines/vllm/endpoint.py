"""The endpoint plugin: the control interface on vLLM's API server, with a token of its own."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from stitch.engines import wire
from stitch.engines.group.control_asgi import ControlAsgi
from stitch.engines.group.engine import GroupTraits
from stitch.engines.group.front import log_to_stderr, start_front
from stitch.engines.vllm import PLUGIN, WORKER_EXTENSION
from stitch.engines.vllm.stamping import Stamping, noting, tells_versions
from stitch.engines.vllm.workers import VllmWorkers
from stitch.errors import UsageError

BLOCKED_ROUTES = (
    "/stitch/*", "/pause", "/resume", "/is_paused", "/abort_requests", "/collective_rpc",
    "/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update",
    "/update_weights", "/finish_weight_update", "/shutdown_weight_transfer_engine",
    "/update_weight_version", "/weight_info", "/weight_checker", "/reset_*", "/sleep", "/wake_up",
    "/is_sleeping", "/release_kv_cache_memory", "/server_info", "/get_world_size",
    "/scale_elastic_ep", "/is_scaling_elastic_ep", "/invocations", "/tokenize",
)  # fmt: skip
"""vLLM's control routes, were they ever switched on, and routes that pass by the salt."""


class StitchEndpoint:
    """Implements vLLM's EndpointPlugin."""

    name = PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Mount the control interface. Raises UsageError, which ends the server, without token."""
        token = os.environ.get(wire.TOKEN_ENV, "")
        if not token:
            raise UsageError(f"set {wire.TOKEN_ENV} to the control token")
        self._control = ControlAsgi(token)
        app.mount(wire.PREFIX, self._control)
        app.add_middleware(Stamping)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Learn where every tensor lives, before requests are taken; what fails ends the server."""
        log_to_stderr()
        config = engine_client.vllm_config
        _check_setup(config, args)
        workers = VllmWorkers(
            engine_client,
            config.parallel_config.world_size,
            multimodal=config.model_config.is_multimodal_model,
        )
        traits = GroupTraits(
            engine="vllm",
            stamps_versions=tells_versions(),
            salt_field="cache_salt",
            blocked_routes=BLOCKED_ROUTES,
        )
        if traits.stamps_versions:
            engine_client.generate = noting(engine_client.generate)
        directory, view = Path(config.model_config.model), os.environ.get(wire.VIEW_ENV, "bf16")
        self._control.serve(*await start_front(workers, directory, view, traits))


def _check_setup(config: Any, args: Any) -> None:
    parallel = config.parallel_config
    if not _is_ours(parallel.worker_extension_cls):
        raise UsageError(f"start vLLM with --worker-extension-cls {WORKER_EXTENSION}")
    if parallel.data_parallel_size > 1 or (getattr(args, "api_server_count", 1) or 1) > 1:
        raise UsageError(
            "one writer, one engine: start one vLLM for each replica instead of "
            "--data-parallel-size or --api-server-count"
        )
    if config.lora_config is not None:
        raise UsageError("weights under LoRA adapters are not changed in place: leave out LoRA")


def _is_ours(name: str) -> bool:
    """Whether the worker extension is ours, or a class that extends it."""
    if name == WORKER_EXTENSION or not name:
        return bool(name)
    module, _, attribute = name.rpartition(".")
    return hasattr(getattr(importlib.import_module(module), attribute), "stitch_call")
