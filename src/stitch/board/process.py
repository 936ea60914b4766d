"""Telling whether a process that wrote a record is gone for sure. Linux; elsewhere nothing is sure.

A process is named by the boot of its kernel, its process namespace, its number and its start time.
Only from within the same boot and namespace can it be told that there is no such process.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def this_process() -> str:
    """A name that no other process has, here or elsewhere; empty where it cannot be told."""
    place, start = _place(), _start(os.getpid())
    return f"{place} {os.getpid()} {start}" if place and start else ""


def is_gone(process: str) -> bool:
    """Whether the process that `this_process` named has ended. False wherever that is not sure."""
    named, _, start = process.rpartition(" ")
    place, _, number = named.rpartition(" ")
    if not place or place != _place() or not (number.isascii() and number.isdecimal()):
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    found = _start(int(number))
    return bool(found) and found != start


def _place() -> str:
    """This boot of this kernel, and this process namespace."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start(pid: int) -> str:
    """When process `pid` was started, in clock ticks since boot; empty if it cannot be told."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return ""
    # "pid (name) state ...": the name may hold blanks and brackets. Field 22 of proc(5).
    fields = stat.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""
