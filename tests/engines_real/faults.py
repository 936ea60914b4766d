"""Faults in ranks that a file switches on: `RANK FAULT`, removed when it strikes.

`raise`: the rank fails half-way through writing. `kill`: its process ends there. `garble`: its
answer to the commit is lost. `wait`: it writes only when the file comes back. The file is named by
FAULT_ENV; this folder is on PYTHONPATH.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stitch.engines.ranks.port import Answer

FAULT_ENV = "STITCH_TEST_FAULT"
HERE = Path(__file__).parent


FaultPlugin = Callable[[Path], tuple[tuple[str, ...], dict[str, str]]]
"""(a place for files) -> arguments and environment that put these faults into an engine's ranks."""


def with_faults(rank: int, method: str, weights: Any, call: Callable[[], Answer]) -> Answer:
    """What `call` answers, unless a fault is meant for this rank. `weights`: its RankWeights."""
    fault = _fault_of(rank) if method == "commit" else None
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raise":
        _fail_half_way(weights._stage.staged)
    while fault == "wait" and not Path(os.environ[FAULT_ENV]).exists():
        time.sleep(0.01)  # nothing else joins this process to the test
    answer = call()
    return {**answer, "call": answer["call"] - 1} if fault == "garble" else answer


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
