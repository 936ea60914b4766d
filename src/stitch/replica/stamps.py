"""Version stamps in answers: spliced into JSON bodies and put before the end of event streams.

Both work on bytes. A stream is passed on as it arrives: only bytes that may still turn out to be
the terminating `data: [DONE]` event are held back, so one-byte chunks, CRLF, `event:` and `id:`
lines and comments go through unchanged.
"""

from __future__ import annotations

import re

from stitch.replica.body import splice_members
from stitch.types import VersionRef

MAX_HELD_BYTES = 64 * 1024
"""Lines before an event's data are held at most this long; longer ones cannot be the end."""

_STAMPED_JSON = re.compile(rb'"weight_version_start"\s*:')
_END_IN_JSON = re.compile(rb'"weight_version_end"\s*:\s*([0-9]{1,8})')
_STAMP_EVENT = b'"stitch.versions"'
_EVENT_END = re.compile(rb"\n\r?\n|\r\r")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_DONE = (b"data: [DONE]", b"data:[DONE]")


def stamp_json(body: bytes, start: VersionRef, end: VersionRef) -> bytes | None:
    """`body` with both versions and their run as its last members; None if it is no JSON object."""
    members = (
        f'"weight_version_start":{start.version},"weight_version_end":{end.version},'
        f"{_runs(start, end)}"
    )
    return splice_members(body, members.encode()) if body.lstrip()[:1] == b"{" else None


def stamp_run(body: bytes, start: VersionRef, end: VersionRef) -> bytes | None:
    """`body`, into which the engine has put its versions, with their run as its last members."""
    return splice_members(body, _runs(start, end).encode())


def _runs(start: VersionRef, end: VersionRef) -> str:
    """Members that name the run, or both where an answer began on one and ended on another."""
    member = f'"weight_run":"{start.run}"'
    return member if start.run == end.run else f'{member},"weight_run_end":"{end.run}"'


def is_stamped(body: bytes) -> bool:
    """Whether the engine has put its own stamps into a JSON answer."""
    return _STAMPED_JSON.search(body) is not None


def stamped_end(body: bytes) -> int | None:
    """The end version that an engine wrote into its JSON answer."""
    found = _END_IN_JSON.findall(body)
    return int(found[-1]) if found else None


def stamp_event(start: VersionRef, end: VersionRef) -> bytes:
    """The event that ends a stream: both versions, shaped so that chunk parsers skip it."""
    return (
        'data: {"object":"stitch.versions","choices":[],'
        f'"weight_version_start":{start.version},"weight_version_end":{end.version},'
        f"{_runs(start, end)}}}\n\n"
    ).encode()


class StreamStamper:
    """Puts one stamp event before the `[DONE]` event of a server-sent event stream.

    `feed` returns the bytes to send now. It raises nothing: what is not an event stream passes
    through. After the last chunk call `finish`. When the engine already sent a stamp event, nothing
    is added, unless the run has changed, of which the engine's says nothing.
    """

    def __init__(self) -> None:
        self._held = b""
        self._in_event = False
        self._last = b"\n"
        self._tail = b""
        self._stamped = False
        self._told_runs = False

    @property
    def is_holding(self) -> bool:
        """Whether bytes are held back; the next ones may turn them into the end."""
        return bool(self._held)

    def feed(self, chunk: bytes, start: VersionRef, end: VersionRef) -> bytes:
        """Take the next bytes of the stream; `end` is the version at this moment."""
        self._note(chunk)
        data = self._held + chunk if self._held else chunk
        self._held = b""
        out: list[bytes] = []
        position = 0
        while position < len(data):
            if self._in_event:
                position = self._skip_event(data, position, out)
                continue
            verdict = _verdict(data, position)
            if verdict is None:
                self._held = data[position:]
                break
            if verdict:
                self._stamp(out, start, end)
            self._in_event = True
            self._last = b"\n"
        return out[0] if len(out) == 1 else b"".join(out)

    def finish(self, start: VersionRef, end: VersionRef) -> bytes:
        """The last bytes: what was held, and the stamp if no `[DONE]` came."""
        out: list[bytes] = []
        last_line = _LINE_END.split(self._held)[-1].rstrip()
        if last_line in _DONE:
            self._stamp(out, start, end)
            out.append(self._held)
        elif self._adds(start, end):
            unfinished = self._in_event or bool(self._held)
            out += [self._held, b"\n\n" if unfinished else b""]
            self._stamp(out, start, end)
        else:
            out.append(self._held)
        self._held = b""
        return b"".join(out)

    def _note(self, chunk: bytes) -> None:
        """Remember whether the engine's own stamp event has passed, however it is cut."""
        if not self._stamped:
            self._stamped = _STAMP_EVENT in self._tail + chunk
            self._tail = (self._tail + chunk)[-len(_STAMP_EVENT) :]

    def _adds(self, start: VersionRef, end: VersionRef) -> bool:
        return not self._stamped or (start.run != end.run and not self._told_runs)

    def _stamp(self, out: list[bytes], start: VersionRef, end: VersionRef) -> None:
        if self._adds(start, end):
            out.append(stamp_event(start, end))
            self._stamped = self._told_runs = True

    def _skip_event(self, data: bytes, position: int, out: list[bytes]) -> int:
        """Pass on the rest of an event; returns the position after it, or the end of the data.

        `_last` is what stands before `position`, since a chunk border may cut the blank line.
        """
        near = self._last + data[position : position + 2]
        match = _EVENT_END.search(near)
        if match is not None:
            stop = position + match.end() - len(self._last)
        else:
            match = _EVENT_END.search(data, position)
            stop = match.end() if match else len(data)
        self._in_event = match is None
        self._last = (self._last + data[max(position, stop - 2) : stop])[-2:]
        out.append(data[position:stop])
        return stop


def _verdict(data: bytes, position: int) -> bool | None:
    """Whether the event that starts at `position` is `[DONE]`; None if more bytes must tell."""
    if len(data) - position > MAX_HELD_BYTES:
        return False
    while True:
        match = _LINE_END.search(data, position)
        line = data[position : match.start() if match else len(data)]
        if line.startswith(b"data"):
            if match is not None:
                return line.rstrip() in _DONE
            return None if any(done.startswith(line.rstrip()) for done in _DONE) else False
        if match is None:
            return None
        if not line:
            return False  # a blank line: an event without data
        position = match.end()
