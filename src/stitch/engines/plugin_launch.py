"""The command lines of engines that run with a plugin of ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stitch.engines.control_verbs import MIN_TOKEN_CHARS
from stitch.engines.wire import TOKEN_ENV, VIEW_ENV
from stitch.errors import UsageError

OURS = ("--host", "--port", "--served-model-name")
"""Options that the replica gives every engine."""


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
    command = [str(python or sys.executable), "-m", module, str(model)]
    command += ["--host", host, "--port", str(port)]
    if served_model_name is not None:
        command += ["--served-model-name", served_model_name]
    return [*command, *own_arguments(args, view)]


def own_arguments(args: Sequence[str], view: str, decided: Sequence[str] = OURS) -> list[str]:
    """An engine's own arguments, and the dtype of a view that has one, unless they name another.

    UsageError for options that are `decided` elsewhere.
    """
    given = {arg.partition("=")[0] for arg in args}
    for name in decided:
        if name in given:
            raise UsageError(f"{name} is the replica's to give: leave it out of the engine's")
    dtype = ["--dtype", "bfloat16"] if view == "bf16" and "--dtype" not in given else []
    return [*dtype, *args]


def has_token() -> bool:
    """Whether the environment has a control token; says what to do if not."""
    if len(os.environ.get(TOKEN_ENV, "")) >= MIN_TOKEN_CHARS:
        return True
    print(f"set {TOKEN_ENV} to a secret of at least {MIN_TOKEN_CHARS} characters", file=sys.stderr)
    return False


def plugin_environment(view: str = "bf16") -> dict[str, str]:
    return {VIEW_ENV: view}
