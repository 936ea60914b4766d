"""The general plugin: runs in every process of an SGLang that was started for Stitch.

The server process serves the control interface, every scheduler process its rank's weights. SGLang
sees to it that schedulers end with the process that started them.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import sys
import tempfile
from typing import Any

from stitch.engines.group.staging import shared_memory_directory
from stitch.engines.sglang import SOCKETS_ENV
from stitch.engines.wire import TOKEN_ENV

_SCHEDULER = "sglang.srt.managers.scheduler"
_FRONT = "sglang.srt.entrypoints.http_server"
_HEALTH_ENV = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"


def register() -> None:
    """Called by SGLang, once a process. Does nothing in an SGLang without our token."""
    if TOKEN_ENV not in os.environ:
        return
    if multiprocessing.parent_process() is None:
        # Else /health generates a token, which takes 20 s and fails while the engine is paused.
        os.environ.setdefault(_HEALTH_ENV, "false")
        # Unlike a temporary directory's, this path is short, as those of sockets must be.
        sockets = tempfile.mkdtemp(prefix="stitch-ranks-", dir=shared_memory_directory())
        atexit.register(shutil.rmtree, sockets, ignore_errors=True)
        os.environ[SOCKETS_ENV] = sockets
        _hook_front()
    elif _SCHEDULER in sys.modules:  # not so in the process that turns tokens into text
        _hook_scheduler()


def is_in_front() -> bool:
    """Whether the server of this process was hooked."""
    server: Any = sys.modules.get(_FRONT)
    return hasattr(getattr(server, "_setup_and_run_http_server", None), "__wrapped__")


def _hook_front() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from stitch.engines.sglang.front import run_with_control

    HookRegistry.register(f"{_FRONT}._setup_and_run_http_server", run_with_control, HookType.AROUND)


def _hook_scheduler() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from stitch.engines.sglang import scheduler

    HookRegistry.register(f"{_SCHEDULER}.Scheduler.__init__", scheduler.started, HookType.AFTER)
    HookRegistry.register(
        f"{_SCHEDULER}.Scheduler.pause_generation", scheduler.paused, HookType.AFTER
    )
