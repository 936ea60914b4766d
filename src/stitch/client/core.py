"""The asynchronous half of the client: everything here runs on its one event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import aiohttp

from stitch.client.answer import Answer
from stitch.client.dispatch import Dispatcher
from stitch.client.events import OpenStream, open_stream
from stitch.client.exchange import Exchange
from stitch.client.fleet import Fleet, Member
from stitch.client.request import Request
from stitch.client.settings import ClientConfig
from stitch.client.watch import HeartbeatReader, Watch
from stitch.records import Heartbeat


class Core:
    """Session, fleet, heartbeats and dispatch of one client."""

    def __init__(self, reader: HeartbeatReader, settings: ClientConfig) -> None:
        self._settings = settings
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="stitch-client-board")
        self._slots = asyncio.Semaphore(settings.max_in_flight)
        self._observed_once = asyncio.Event()
        self.fleet = Fleet(stale_after_s=settings.stale_after_s)
        self._watch = Watch(
            reader, self._executor, settings.refresh_s, self._observed, self._troubled
        )
        self._dispatcher = Dispatcher(self.fleet, refresh_now=self._watch.refresh_now)
        self._session: aiohttp.ClientSession | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._settings.connect_timeout_s
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=2**20,
        )
        self._exchange = Exchange(self._session, self.fleet, self._settings)
        self._watching = asyncio.create_task(self._watch.run())
        self._watching.add_done_callback(self._watching_ended)

    async def ask(self, request: Request) -> Answer:
        async with self._slots:
            return await self._dispatcher.deliver(
                request,
                lambda member, left_s, number: self._exchange.ask(request, member, left_s, number),
            )

    async def open_stream(self, request: Request) -> OpenStream:
        """Streams are not counted among `max_in_flight`: their end is up to the caller."""

        async def attempt(member: Member, left_s: float, number: int) -> OpenStream:
            return await open_stream(self._exchange, self.fleet, request, member, left_s, number)

        return await self._dispatcher.deliver(request, attempt)

    async def members(self) -> list[Member]:
        """What is known, after the board was read at least once or could not be."""
        await self._observed_once.wait()
        return self.fleet.members

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _observed(self, beats: list[Heartbeat]) -> None:
        self._dispatcher.fleet_changed(self.fleet.observe(beats))

    def _troubled(self, trouble: str) -> None:
        self._dispatcher.trouble = trouble
        self._observed_once.set()

    def _watching_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._troubled(f"heartbeats are no longer read: {type(error).__name__}: {error}")
            raise error
