"""What the program says: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

Progress = Callable[[int, int], None]


class Console:
    """One per call of the program. With `as_json`, stdout carries exactly one JSON object."""

    def __init__(self, *, as_json: bool, verbose: bool) -> None:
        self.as_json = as_json
        self.verbose = verbose
        self._emitted = False
        self.closed = False
        """Whether whoever read stdout went away."""

    def result(self, record: Mapping[str, object], lines: Sequence[str] | str) -> None:
        """The outcome: `record` with --json, `lines` otherwise."""
        if self.as_json:
            self._emitted = True
            self._print(json.dumps(record, allow_nan=False))
        else:
            self._print(lines if isinstance(lines, str) else "\n".join(lines))

    def _print(self, text: str) -> None:
        self.closed = not _write(sys.stdout, text + "\n") or self.closed

    def note(self, text: str) -> None:
        """Something worth knowing that is not the result."""
        _write(sys.stderr, text + "\n")

    def error(self, kind: str, message: str) -> None:
        """The line that ends a failed call; with --json also the object on stdout."""
        _write(sys.stderr, f"error: {message}\n")
        if self.as_json and not self._emitted:
            self.result({"error": {"type": kind, "message": message}}, "")

    @contextmanager
    def progress(self, what: str, *, counts: bool = False) -> Iterator[Progress | None]:
        """A bar on stderr for the work inside, in bytes or in `counts`, if somebody is watching."""
        if self.as_json or not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console as RichConsole
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar

        amount = MofNCompleteColumn() if counts else DownloadColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), amount)
        with Bar(
            *columns, TimeRemainingColumn(), console=RichConsole(stderr=True), transient=True
        ) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _write(stream: TextIO | None, text: str) -> bool:
    """Write and flush; False if nobody reads: the stream was closed, or its reader left."""
    if stream is None:  # how Python shows a descriptor that was closed at the start (`>&-`)
        return False
    try:
        stream.write(_encodable(text, stream.encoding))
        stream.flush()
        return True
    except BrokenPipeError:
        # Python flushes once more at exit; let that go nowhere instead of failing.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return False


def _encodable(text: str, encoding: str | None) -> str:
    """`text` with what the stream's encoding lacks as escapes."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
