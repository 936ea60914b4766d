"""JSON lines from the trainer to the supervisor, through a file that both know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class EventWriter:
    """Appends one JSON object a line; each is complete once `emit` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def emit(self, event: str, **fields: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")


class EventReader:
    """Reads what was appended since the last call; an unfinished last line waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
