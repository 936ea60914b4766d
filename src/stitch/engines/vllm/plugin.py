"""The general plugin: runs in every process of a vLLM that was started for Stitch.

Weights are changed in place, so they must be there: on CPUs vLLM packs the weights of linear layers
for its oneDNN kernels and empties the parameters, unless that support is switched off before the
model is loaded. And no process of the engine may outlive the one that it belongs to.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from multiprocessing import connection
from typing import Any

from stitch.engines.group.ending import EXIT_STATUS
from stitch.engines.wire import TOKEN_ENV

_watching = threading.Event()


def register() -> None:
    """Called by vLLM, perhaps several times a process. Does nothing in a vLLM without our token."""
    if TOKEN_ENV not in os.environ:
        return
    _keep_parameters_live()
    _end_with_parent()


def _keep_parameters_live() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm._custom_ops as ops

        ops._supports_onednn = False


def _end_with_parent() -> None:
    """vLLM's own children notice only an orderly end of their parent."""
    parent = multiprocessing.parent_process()
    if parent is None or _watching.is_set():
        return
    _watching.set()
    threading.Thread(target=_watch, args=(parent,), name="stitch-parent-watch", daemon=True).start()


def _watch(parent: Any) -> None:
    connection.wait([parent.sentinel])
    print(f"stitch: process {parent.pid} ended; so does its child", file=sys.stderr, flush=True)
    os._exit(EXIT_STATUS)
