"""What a request brings back: the engine's JSON and the weight versions that produced it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stitch.types import MAX_VERSION, VersionSpan

START_HEADER = "X-Stitch-Version-Start"
END_HEADER = "X-Stitch-Version-End"
RUN_HEADER = "X-Stitch-Run"
RUN_END_HEADER = "X-Stitch-Run-End"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One finished answer."""

    body: dict[str, Any]
    """The engine's JSON answer, as it came."""
    version_start: int | None
    """Version the engine served when it began; None when the server does not stamp versions."""
    version_end: int | None
    """Version the engine served when it ended."""
    run: str | None
    """Run of `version_start`."""
    run_end: str | None = None
    """Run of `version_end`: another one if the replica went over to it meanwhile."""
    replica: str
    """Id of the replica that answered."""
    attempts: int
    """Requests sent for this answer, the successful one included."""

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The choices of a completion; empty for other answers."""
        choices = self.body.get("choices")
        return [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []

    @property
    def texts(self) -> list[str]:
        """The text of each choice, of a completion or of a chat."""
        return [_text(choice) for choice in self.choices]

    def spans(self, choice: int = 0) -> tuple[VersionSpan, ...]:
        """Which output tokens of `choice` came from which version; empty if not reported."""
        rows = self.choices[choice].get("weight_versions") or ()
        return tuple(VersionSpan(row["version"], row["start"], row["end"]) for row in rows)


def stamped_versions(
    body: Mapping[str, Any], headers: Mapping[str, str]
) -> tuple[int | None, int | None]:
    """Start and end version of an answer: from its JSON, else from its headers."""
    start = _version(body.get("weight_version_start"), headers.get(START_HEADER))
    end = _version(body.get("weight_version_end"), headers.get(END_HEADER))
    return start, end


def ended_run(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The run that an answer ended on, if it says that this is not the one it began on."""
    found = body.get("weight_run_end", headers.get(RUN_END_HEADER))
    return found if isinstance(found, str) else None


def _version(number: object, header: str | None) -> int | None:
    found = as_version(number)
    if found is None and header is not None and re.fullmatch(r"[0-9]{1,8}", header):
        return int(header)
    return found


def as_version(value: object) -> int | None:
    """A JSON value as a version number, or None if it is none."""
    is_version = type(value) is int and 0 <= value <= MAX_VERSION
    return value if is_version else None  # type: ignore[return-value]


def loaded(text: str | bytes) -> object:
    """The JSON value that a replica sent, or None for anything else, however it is broken."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def _text(choice: Mapping[str, Any]) -> str:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    return text if isinstance(text, str) else ""
