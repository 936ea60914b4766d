"""Version stamps on the answers of an engine that knows which weights its tokens came from.

An engine's plugin notes the spans of each choice where all answers pass (`Notes`), and sends the
answer through `stamped`, which writes them as every engine of ours does (`stitch.engines.stamps`).
An answer of which something is not known is left as it is: then the replica stamps it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from stitch.engines import stamps
from stitch.engines.group.control_asgi import Send

_DONE = re.compile(rb"(?:^|(?<=\n))data: ?\[DONE\]")

Loads = Callable[[bytes], Any]
Dumps = Callable[[Any], bytes]


class Notes:
    """Versions of the output tokens of one request's choices, as they become known."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._versions: dict[int, list[int | None]] = {}

    def expect(self, count: int) -> int:
        """Further choices of the answer are asked for; returns the number of the first."""
        first = len(self._seen)
        self._seen.update(range(first, first + count))
        return first

    def see(self, index: int) -> None:
        """The answer has a choice of this number."""
        self._seen.add(index)

    def put(self, index: int, spans: Iterable[tuple[str, int, int]]) -> None:
        """The whole of a choice: (label of the weights, first token, one past the last token)."""
        self.see(index)
        self._versions[index] = [
            _number(label) for label, start, end in spans for _ in range(start, end)
        ]

    def choices(self) -> list[list[int | None]] | None:
        """A version a token, choice by choice; None while that of one of them is not known."""
        if not self._seen or self._seen != set(self._versions):
            return None
        if set(self._versions) != set(range(len(self._versions))):
            return None
        return [self._versions[index] for index in range(len(self._versions))]


def _number(label: str) -> int | None:
    """Labels that are not ours stand for unknown weights."""
    return int(label) if label.isascii() and label.isdigit() else None


def stamped(notes: Notes, send: Send, loads: Loads, dumps: Dumps) -> Send:
    """A `send` that puts stamps on the answer that it is given, from `notes` at its end."""
    return _Answer(notes, send, loads, dumps).send


class _Answer:
    """One answer on its way: a JSON one is held until it is whole, a stream until its end event."""

    def __init__(self, notes: Notes, send: Send, loads: Loads, dumps: Dumps) -> None:
        self._notes, self._send = notes, send
        self._loads, self._dumps = loads, dumps
        self._start: MutableMapping[str, Any] = {}
        self._held: bytearray | None = None
        self._is_stream = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message["headers"]}
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip()
            if message["status"] == 200 and b"content-encoding" not in headers:
                self._is_stream = kind == b"text/event-stream"
                if kind == b"application/json":
                    self._start, self._held = message, bytearray()
                    return
        elif message["type"] == "http.response.body":
            if self._held is not None:
                self._held += message.get("body", b"")
                if not message.get("more_body"):
                    await self._send_stamped(bytes(self._held))
                return
            if self._is_stream:
                message = {**message, "body": self._with_event(message.get("body", b""))}
        await self._send(message)

    async def _send_stamped(self, body: bytes) -> None:
        choices = self._notes.choices()
        stamped = None if choices is None else self._stamped(body, choices)
        body = body if stamped is None else stamped
        headers = [
            (name, value)
            for name, value in self._start["headers"]
            if name.lower() != b"content-length"
        ]
        if choices is not None and stamped is not None:
            headers += [(n.encode(), v.encode()) for n, v in stamps.headers(choices).items()]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _stamped(self, body: bytes, choices: list[list[int | None]]) -> bytes | None:
        """None if the answer's choices are not those noted. A list, the answer to a batch on
        /generate, has headers only."""
        answer = self._loads(body)
        if not isinstance(answer, dict):
            return body
        shown = answer.get("choices")
        if shown is not None:
            if [choice.get("index") for choice in shown] != list(range(len(choices))):
                return None
            for choice, versions in zip(shown, choices, strict=True):
                choice["weight_versions"] = stamps.spans_json(versions)
        return self._dumps({**answer, **stamps.stamp_json(choices)})

    def _with_event(self, body: bytes) -> bytes:
        end = _DONE.search(body)
        choices = self._notes.choices() if end else None
        if end is None or choices is None:
            return body
        event = b"data: " + self._dumps(stamps.stream_event(choices)) + b"\n\n"
        return body[: end.start()] + event + body[end.start() :]
