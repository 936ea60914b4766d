"""How an engine in doubt ends: all of its processes, with one status and one line that says why."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

EXIT_STATUS = 70


def end_engine(reason: str) -> NoReturn:
    """End this process and all below it."""
    print(f"stitch engine: fatal: {reason}; exiting", file=sys.stderr, flush=True)
    for pid in descendants(os.getpid()):
        if not _tidies_up(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    os._exit(EXIT_STATUS)


def _tidies_up(pid: int) -> bool:
    """Whether it is one of multiprocessing's trackers, which remove shared memory and then end."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """All processes below one, as /proc shows them now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # "pid (name) state parent ...": the name may hold spaces and brackets.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
