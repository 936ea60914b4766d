"""An HTTP proxy before an object store that loses, delays, cuts and refuses on demand.

    with FaultProxy("http://127.0.0.1:8333") as proxy:
        proxy.lose_reply("manifest.json")        # the write happens, the connection breaks
        board = open_board(f"s3://bucket?endpoint={proxy.url}")

A fault strikes requests whose method is listed and whose raw path and query contain `match`; it is
used up after `times` of them (None: never), the first `after` being let through. Faults that were
added first come first. Requests are passed on with the headers and bytes that came, so signatures
hold. The proxy runs in a thread of its own, on loopback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from aiohttp import web

from stitch.testing.recording_proxy import (
    ALL,
    READS,
    WRITES,
    Answer,
    ProxyFault,
    RecordingProxy,
    break_off,
    respond,
)


class FaultProxy(RecordingProxy):
    """See the module. `requests` lists what came, as (method, raw path and query)."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self._lists: dict[str, Answer] = {}

    # --- planning faults -------------------------------------------------------------------

    def answer(
        self,
        status: int,
        match: str = "",
        *,
        code: str = "Planned",
        methods: tuple[str, ...] = ALL,
        times: int | None = 1,
        after: int = 0,
    ) -> ProxyFault:
        """Answer with an error of the store's kind; nothing reaches the store."""
        body = f"<Error><Code>{code}</Code><Message>planned</Message></Error>".encode()

        async def play(request: web.Request, data: bytes) -> web.StreamResponse:
            return web.Response(status=status, body=body, content_type="application/xml")

        return self._plan(play, match, methods, times, after)

    def lose_reply(
        self,
        match: str = "",
        *,
        methods: tuple[str, ...] = WRITES,
        times: int | None = 1,
        after: int = 0,
    ) -> ProxyFault:
        """Let the store do it, then break the connection instead of answering."""

        async def play(request: web.Request, data: bytes) -> web.StreamResponse:
            await self.ask(request, data)
            return break_off(request)

        return self._plan(play, match, methods, times, after)

    def drop(
        self,
        match: str = "",
        *,
        methods: tuple[str, ...] = ALL,
        times: int | None = 1,
        after: int = 0,
    ) -> ProxyFault:
        """Break the connection; nothing reaches the store."""

        async def play(request: web.Request, data: bytes) -> web.StreamResponse:
            return break_off(request)

        return self._plan(play, match, methods, times, after)

    def cut(
        self, match: str = "", *, keep: int, times: int | None = 1, after: int = 0
    ) -> ProxyFault:
        """Send the first `keep` bytes of a body whose full length was announced, then break off."""

        async def play(request: web.Request, data: bytes) -> web.StreamResponse:
            response = await self.begin(request, await self.ask(request, data), keep)
            await response.drain()
            return break_off(request, response)

        return self._plan(play, match, ("GET",), times, after)

    def stall(
        self, match: str = "", *, keep: int = 0, times: int | None = 1, after: int = 0
    ) -> ProxyFault:
        """Send the first `keep` bytes of a body, then nothing until `heal` or the end."""

        async def play(request: web.Request, data: bytes) -> web.StreamResponse:
            response = await self.begin(request, await self.ask(request, data), keep)
            await self._released.wait()
            return break_off(request, response)

        return self._plan(play, match, ("GET",), times, after)

    def trickle(
        self,
        match: str = "",
        *,
        piece_bytes: int,
        pause_s: float,
        times: int | None = 1,
        after: int = 0,
    ) -> ProxyFault:
        """Send bodies slowly, a piece at a time."""

        async def play(request: web.Request, data: bytes) -> web.StreamResponse:
            found = await self.ask(request, data)
            response = await self.begin(request, found, 0)
            for start in range(0, len(found.body), piece_bytes):
                await response.write(found.body[start : start + piece_bytes])
                await asyncio.sleep(pause_s)
            await response.write_eof()
            return response

        return self._plan(play, match, ("GET",), times, after)

    def change(
        self,
        match: str,
        change: Callable[[bytes], bytes],
        *,
        times: int | None = 1,
        after: int = 0,
    ) -> ProxyFault:
        """Send another body, with the length that it has, as if it were the store's."""

        async def play(request: web.Request, data: bytes) -> web.StreamResponse:
            found = await self.ask(request, data)
            found.body = change(found.body)
            return respond(found)

        return self._plan(play, match, ("GET",), times, after)

    def change_upload(
        self,
        match: str,
        change: Callable[[bytes], bytes],
        *,
        times: int | None = 1,
        after: int = 0,
    ) -> ProxyFault:
        """Pass another body on to the store than was sent (of use where bodies are not signed)."""

        async def play(request: web.Request, data: bytes) -> web.StreamResponse:
            return respond(await self.ask(request, change(data)))

        return self._plan(play, match, ("PUT", "POST"), times, after)

    def hide(self, match: str, *, times: int | None = 1, after: int = 0) -> ProxyFault:
        """Answer reads as if there were no such object (yet)."""
        return self.answer(404, match, code="NoSuchKey", methods=READS, times=times, after=after)

    def stale_lists(self, *, times: int | None = None) -> ProxyFault:
        """Answer each listing as it was answered first after this call."""
        self._lists.clear()

        async def play(request: web.Request, data: bytes) -> web.StreamResponse:
            if request.raw_path not in self._lists:
                self._lists[request.raw_path] = await self.ask(request, data)
            return respond(self._lists[request.raw_path])

        return self._plan(play, "list", ("GET",), times, 0)

    def ignore_conditions(self) -> ProxyFault:
        """Take the condition off every write, so that a create overwrites."""

        async def play(request: web.Request, data: bytes) -> web.StreamResponse:
            return respond(await self.ask(request, data, without="if-none-match"))

        return self._plan(play, "", ("PUT",), None, 0)

    def set_clock(self, offset_s: float) -> None:
        """Move the store's clock, as far as its answers show it."""
        self._clock_offset = timedelta(seconds=offset_s)

    def heal(self) -> None:
        """Forget all planned faults and let go of what is stalled."""
        super().heal()
        self._loop.call_soon_threadsafe(self._released.set)

    def _plan(
        self,
        play: Callable[[web.Request, bytes], Awaitable[web.StreamResponse]],
        match: str,
        methods: tuple[str, ...],
        times: int | None,
        after: int,
    ) -> ProxyFault:
        self._loop.call_soon_threadsafe(self._released.clear)
        return self._add(
            ProxyFault(kinds=methods, match=match, times=times, after=after, play=play)
        )
