"""Small helpers for text that people read."""

from __future__ import annotations


def tail(text: str, num_lines: int = 15) -> str:
    """The last lines of `text`, indented, without what progress bars wrote over."""
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
    return "\n".join(f"  | {line}" for line in [line for line in lines if line][-num_lines:])
