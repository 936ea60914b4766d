"""Numbers and tables as people read them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence


def num_bytes(count: float) -> str:
    """`12.3 MB`; decimal units, three significant digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:.0f} TB"


def percent(share: float) -> str:
    """`0.442 %`."""
    return f"{100 * share:.3g} %"


def utc(unix_s: float) -> str:
    """A moment, or the bare number where no calendar reaches (any writer may have sent it)."""
    try:
        moment = datetime.datetime.fromtimestamp(unix_s, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{unix_s:g} s"
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines with aligned columns: numbers to the right, text to the left."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(header))]
    lines = [list(header), *cells]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else printable(str(value))


def printable(text: str) -> str:
    """`text` on one line, with what could steer a terminal or mislead a reader as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _is_number(value: object) -> bool:
    text = str(value).split(" ")[0].lstrip("-")
    return value is None or text.replace(".", "", 1).replace("e", "", 1).isdigit()


def fields(pairs: Sequence[tuple[str, object]]) -> list[str]:
    """`name  value` lines, values aligned."""
    width = max(len(name) for name, _ in pairs)
    return [f"{name.ljust(width)}  {_cell(value)}" for name, value in pairs]
