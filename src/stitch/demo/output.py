"""Small helpers for text that people read."""

from __future__ import annotations

from rich.console import Console


def tail(text: str, num_lines: int = 15) -> str:
    """The last lines of `text`, indented, without what progress bars wrote over."""
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
    return "\n".join(f"  | {line}" for line in [line for line in lines if line][-num_lines:])


def plain_console() -> Console:
    """Standard output, without guesses at what to colour; wide enough for a table in a file."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=100)
