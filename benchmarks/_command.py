"""What the commands of all benchmarks have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def command_line(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of `python -m benchmarks.NAME`, which takes --json."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def table(heads: Sequence[str], body: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lines of a table in Markdown, and an empty one."""
    for cells in (heads, ["---"] * len(heads), *body):
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""


def table_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> Iterator[str]:
    """The same for rows of a result; columns: which fields (default: those of the first row)."""
    chosen = columns or list(rows[0])
    return table(chosen, ([row[name] for name in chosen] for row in rows))
