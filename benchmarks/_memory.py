"""Resident memory of this process, as the kernel counts it (Linux)."""

from __future__ import annotations

from pathlib import Path


def start_watching() -> int:
    """Resident bytes now; the kernel's high-water mark starts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most that was resident since `start_watching`."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")
