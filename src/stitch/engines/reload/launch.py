"""The command lines of stock engines."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stitch.engines.plugin_launch import OURS, own_arguments

_DECIDED = (*OURS, "--model", "--model-path", "--load-format")


@dataclass(frozen=True, kw_only=True)
class _Start:
    """How one engine is started on a directory."""

    module: tuple[str, ...]
    model: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


_STARTS: Mapping[str, _Start] = {
    "vllm": _Start(
        module=("-m", "vllm.entrypoints.cli.main", "serve"),
        model=(),
        env={"VLLM_SERVER_DEV_MODE": "1"},
    ),
    "sglang": _Start(
        module=("-m", "sglang.launch_server"),
        model=("--model-path",),
        # A health check that generates a token blocks while the engine is paused.
        env={"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"},
    ),
}


def stock_command(
    engine: str,
    directory: Path,
    *,
    port: int,
    served_model_name: str,
    python: str | Path | None = None,
    view: str = "bf16",
    args: Sequence[str] = (),
) -> list[str]:
    """A stock `engine` on loopback that serves `directory`, with `stock_environment(engine)`.

    It ends with this process, and with all of its own. UsageError for arguments decided here.
    """
    start = _STARTS[engine]
    keeper = [sys.executable, "-m", "stitch.engines.reload.keeper", str(os.getpid()), "--"]
    command = [*keeper, str(python or sys.executable), *start.module, *start.model, str(directory)]
    # Loopback, always: whoever reaches these routes can change the weights.
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", served_model_name]
    return [*command, *own_arguments(args, view, _DECIDED)]


def stock_environment(engine: str) -> dict[str, str]:
    return dict(_STARTS[engine].env)
