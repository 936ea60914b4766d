"""`python -m stitch.engines.vllm MODEL [vLLM's arguments]`: vLLM's server with our plugin.

Sets what the plugin needs (VLLM_PLUGINS, the worker extension) and becomes `vllm serve`. The
control token comes in STITCH_ENGINE_TOKEN, never on the command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import NoReturn

from stitch.engines.plugin_launch import has_token
from stitch.engines.vllm import PLUGIN, WORKER_EXTENSION

_ENDPOINTS = "vllm.endpoint_plugins"


def main(argv: list[str]) -> NoReturn:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    if not has_token():
        sys.exit(2)
    os.environ["VLLM_PLUGINS"] = plugins(os.environ.get("VLLM_PLUGINS"), _installed())
    extended = any(arg.partition("=")[0] == "--worker-extension-cls" for arg in argv)
    extension = [] if extended else ["--worker-extension-cls", WORKER_EXTENSION]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *argv, *extension]
    os.execv(sys.executable, command)


def plugins(allowed: str | None, installed: Iterable[EntryPoint]) -> str:
    """VLLM_PLUGINS with ours. Unset, it allows every plugin but endpoints; ours must be named, and
    then so must all the others that would have been loaded."""
    if allowed is not None:
        names = [name for name in allowed.split(",") if name]
    else:
        names = [
            point.name
            for point in installed
            if point.group.startswith("vllm.") and point.group != _ENDPOINTS
        ]
    return ",".join(dict.fromkeys([*names, PLUGIN]))


def _installed() -> Iterable[EntryPoint]:
    points = entry_points()
    return (point for group in points.groups for point in points.select(group=group))


if __name__ == "__main__":
    main(sys.argv[1:])
