"""The command lines of engines that run with a plugin of ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from stitch.engines.wire import VIEW_ENV
from stitch.errors import UsageError

_OURS = ("--host", "--port", "--served-model-name")


def plugin_command(
    module: str,
    model: str | Path,
    *,
    port: int,
    host: str = "127.0.0.1",
    served_model_name: str | None = None,
    python: str | Path | None = None,
    view: str = "bf16",
    args: Sequence[str] = (),
) -> list[str]:
    """`python -m module MODEL ...`, for EngineProcess, together with `plugin_environment(view)`.

    `python` is the interpreter of the environment that the engine is installed in (default: this
    one); `args` are the engine's own, passed on. UsageError for those that are decided here.
    """
    given = {arg.partition("=")[0] for arg in args}
    for name in _OURS:
        if name in given:
            raise UsageError(f"{name} is the replica's to give: leave it out of the engine's")
    command = [str(python or sys.executable), "-m", module, str(model)]
    command += ["--host", host, "--port", str(port)]
    if served_model_name is not None:
        command += ["--served-model-name", served_model_name]
    if view == "bf16" and "--dtype" not in given:
        command += ["--dtype", "bfloat16"]
    return [*command, *args]


def plugin_environment(view: str = "bf16") -> dict[str, str]:
    return {VIEW_ENV: view}
