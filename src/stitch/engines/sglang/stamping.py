"""Version stamps from SGLang's own record of which weights a token came from.

SGLang counts, in its schedulers, which output tokens were made under which version, and gives the
spans with the last answer of each choice (`meta_info.weight_versions`). Its OpenAI routes show
those of the first choice only, and none in streams; so they are noted where all answers pass, and
written as every engine of ours writes them (`stitch.engines.stamps`). An answer of which something
is not known is left as it is: then the replica stamps it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

from stitch.engines import stamps
from stitch.engines.group.control_asgi import Scope, Send

ROUTES = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
_NOTES = "stitch.versions"
_DONE = re.compile(rb"(?:^|(?<=\n))data: ?\[DONE\]")

Loads = Callable[[bytes], Any]
Dumps = Callable[[Any], bytes]


class Notes:
    """Versions of the output tokens of one request's choices, as they become known."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._versions: dict[int, list[int | None]] = {}

    def take(self, answer: Any) -> None:
        """Note what an answer of the tokenizer manager says: of one choice, or a list of all."""
        if isinstance(answer, list):
            for index, one in enumerate(answer):
                self._take_one(index, one)
        else:
            self._take_one(answer.get("index", 0), answer)

    def _take_one(self, index: int, answer: Any) -> None:
        self._seen.add(index)
        spans = answer.get("meta_info", {}).get("weight_versions")
        if spans:
            self._versions[index] = [
                _number(span["version"])
                for span in spans
                for _ in range(span["start"], span["end"])
            ]

    def choices(self) -> list[list[int | None]] | None:
        """A version a token, choice by choice; None while that of one of them is not known."""
        if not self._seen or self._seen != set(self._versions):
            return None
        if set(self._versions) != set(range(len(self._versions))):
            return None
        return [self._versions[index] for index in range(len(self._versions))]


def _number(version: str) -> int | None:
    """Labels that are not ours stand for unknown weights."""
    return int(version) if version.isascii() and version.isdigit() else None


def noting(generate: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    """`TokenizerManager.generate_request`, noting versions for requests that carry `Notes`."""

    async def generate_request(
        obj: Any, request: Any = None, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        notes = None if request is None else request.scope.get(_NOTES)
        answers = generate(obj, request, *args, **kwargs)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                if notes is not None:
                    notes.take(answer)
                yield answer

    return generate_request


def stamping(scope: Scope, send: Send, loads: Loads, dumps: Dumps) -> Send:
    """A `send` that stamps the answer to the request of `scope`."""
    scope[_NOTES] = notes = Notes()
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
