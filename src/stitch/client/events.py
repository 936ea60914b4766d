"""Streamed answers: server-sent events, passed on as they come, ending with the versions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import aiohttp

from stitch.client.answer import ended_run, loaded, stamped_versions
from stitch.client.exchange import Exchange
from stitch.client.fleet import Fleet, Member
from stitch.client.request import AttemptFailed, Request
from stitch.errors import RequestFailedError, StreamBrokenError

Event = dict[str, Any]
VERSIONS_OBJECT = "stitch.versions"
MAX_EVENT_BYTES = 64 * 2**20
DRAIN_S = 1.0


async def sse_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each server-sent event: lines joined, comments and other fields left out.

    Source: WHATWG HTML, section 9.2.6 "Interpreting an event stream"; LF and CRLF line ends.
    """
    rest, data = b"", []
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise StreamBrokenError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
            elif not line and data:
                yield "\n".join(data)
                data = []


class OpenStream:
    """A stream whose first event has arrived. Closing it closes the connection."""

    def __init__(
        self,
        request: Request,
        member: Member,
        response: aiohttp.ClientResponse,
        fleet: Fleet,
        attempts: int,
    ) -> None:
        self.replica = member.id
        self.run = member.beat.run
        self._run_end: str | None = None
        self.attempts = attempts
        self.version_start, self.version_end = stamped_versions({}, response.headers)
        self._gap_s = request.deadline_s
        self._member, self._fleet = member, fleet
        self._cleanup = AsyncExitStack()
        self._data = sse_data(response.content.iter_any())
        self._first: Event | None = None
        self._ended = False

    async def start(self) -> None:
        """Wait for the first event, so that until then another replica can be asked."""
        self._first = await self._next()
        if self._first is None:
            raise AttemptFailed("the stream ended without an event", may_have_run=True)

    def own(self, cleanup: AsyncExitStack) -> None:
        """Take over what has to be released when the stream ends; outstanding until then."""
        self._fleet.started(self._member)
        cleanup.callback(self._fleet.ended, self._member)
        self._cleanup = cleanup

    async def next_event(self) -> Event | None:
        """The next event, None after the last. Raises StreamBrokenError if it breaks off."""
        if self._first is not None:
            event, self._first = self._first, None
            return event
        if self._ended:
            return None
        try:
            async with asyncio.timeout(self._gap_s):
                event_or_end = await self._next()
        except TimeoutError:
            await self.aclose()
            raise self._broken(f"no event for {self._gap_s:g} s") from None
        except (aiohttp.ClientError, StreamBrokenError) as error:
            await self.aclose()
            raise self._broken(str(error) or type(error).__name__) from None
        if event_or_end is None:
            await self.aclose()
        return event_or_end

    async def _next(self) -> Event | None:
        """Raises StreamBrokenError unless `[DONE]` came before the end."""
        async for data in self._data:
            if data.strip() == "[DONE]":
                self._fleet.succeeded(self._member, self.version_end)
                await self._drain()
                return None
            return self._parsed(data)
        raise StreamBrokenError("it ended without [DONE]")

    async def _drain(self) -> None:
        """Read the end of the body, so that the connection can be used again."""
        with suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(DRAIN_S):
                async for _ in self._data:
                    pass

    def _parsed(self, data: str) -> Event:
        event = loaded(data)
        if not isinstance(event, dict):
            raise StreamBrokenError(f"an event is not a JSON object: {data[:200]!r}")
        if event.get("error"):
            raise StreamBrokenError(f"the engine reports {json.dumps(event['error'])[:500]}")
        if event.get("object") == VERSIONS_OBJECT:
            self.version_start, self.version_end = stamped_versions(event, {})
            self._run_end = ended_run(event, {})
        return event

    @property
    def run_end(self) -> str | None:
        return self._run_end or self.run

    def _broken(self, why: str) -> StreamBrokenError:
        return StreamBrokenError(f"the stream from replica {self.replica} broke off: {why}")

    async def aclose(self) -> None:
        """Close the connection, which aborts the generation if it still runs."""
        self._ended = True
        await self._cleanup.aclose()


async def open_stream(
    exchange: Exchange, fleet: Fleet, request: Request, member: Member, left_s: float, number: int
) -> OpenStream:
    """One attempt at a stream, up to and including its first event."""
    request = replace(request, body={**request.body, "stream": True})
    async with AsyncExitStack() as cleanup:
        started_s = fleet.now()
        try:
            async with asyncio.timeout(exchange.budget_s(left_s)):
                response = await exchange.post(request, member, started_s)
                cleanup.callback(response.close)
                await exchange.check_status(request, member, response, started_s)
                _check_is_stream(member, response)
                stream = OpenStream(request, member, response, fleet, number)
                stream.run = exchange.check_stamp(request, member, response, stream.version_start)
                await stream.start()
        except TimeoutError:
            raise exchange.timed_out(member, started_s) from None
        except (aiohttp.ClientError, StreamBrokenError) as error:
            raise exchange.broke(member, error, started_s) from None
        stream.own(cleanup.pop_all())
    return stream


def _check_is_stream(member: Member, response: aiohttp.ClientResponse) -> None:
    if response.content_type != "text/event-stream":
        raise RequestFailedError(
            f"replica {member.id} answered a stream request with {response.content_type}",
            status=response.status,
        )
