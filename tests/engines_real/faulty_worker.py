"""Our worker extension with faults that a file switches on: `RANK FAULT`, removed when it strikes.

`raise`: the rank fails half-way through writing. `kill`: its process ends there. `garble`: its
answer to the commit is lost. Named by `--worker-extension-cls`; this folder is on PYTHONPATH.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stitch.engines.ranks.port import Answer
from stitch.engines.vllm.worker import StitchWorkerExtension

FAULT_ENV = "STITCH_TEST_FAULT"


class FaultyWorkerExtension(StitchWorkerExtension):
    def stitch_call(self, number: int, method: str, args: Sequence[Any]) -> Answer:
        worker: Any = self
        fault = _fault_of(worker.rank) if method == "commit" else None
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            _fail_half_way(worker._stitch_rank._stage.staged)
        answer = super().stitch_call(number, method, args)
        return {**answer, "call": number - 1} if fault == "garble" else answer


def _fault_of(rank: int) -> str | None:
    """The fault that is meant for this rank, once."""
    file = Path(os.environ[FAULT_ENV])
    try:
        target, fault = file.read_text().split()
    except (OSError, ValueError):
        return None
    if int(target) != rank:
        return None
    file.unlink()
    return fault


def _fail_half_way(staged: Any) -> None:
    write = staged.write

    def broken() -> None:
        write()
        raise RuntimeError("injected: the device broke off")

    staged.write = broken
