"""The client that a trainer embeds: one call, some replica, the answer with its versions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from stitch.client.answer import Answer
from stitch.client.core import Core
from stitch.client.fleet import Member
from stitch.client.loop import LoopThread
from stitch.client.request import Request, make_request
from stitch.client.settings import ClientConfig
from stitch.client.stream import AsyncStream, Stream
from stitch.client.watch import HeartbeatReader, WatchedBoard, open_watched
from stitch.config import load
from stitch.types import ReplicaState

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class ReplicaInfo:
    """What the client knows of one replica."""

    id: str
    url: str
    run: str | None
    region: str
    state: ReplicaState
    applied: int | None
    ready: bool
    reason: str
    alive: bool
    outstanding: int
    aside_s: float
    """Seconds for which others are preferred, because it failed; 0 if it is in good standing."""
    last_answer: str


class Client:
    """Spreads requests over the replicas that a board lists. Safe to use from many threads.

    `run` None follows the board's current run. Settings are the fields of
    :class:`ClientConfig`, by keyword; `STITCH_CLIENT_*` variables fill in what is not given.

    A generation request may reach two engines when the first one breaks before its answer has
    arrived: nobody has seen the first one's output, so the answer is still one answer. A request
    that must not be repeated says `idempotent=False`.
    """

    def __init__(
        self, board: WatchedBoard | str | Path, run: str | None = None, **settings: Any
    ) -> None:
        self.settings = load(ClientConfig, "client", flags=settings)
        self._named_run = run
        reader = HeartbeatReader(open_watched(board), run)
        self._core = Core(reader, self.settings)
        self._loop = LoopThread("stitch-client")
        self._loop.call(self._core.start())

    # --- waiting calls -------------------------------------------------------------------------

    def completions(self, **fields: Any) -> Answer:
        """POST /v1/completions. Fields are the engine's, plus `min_version` or `exact_version`,
        the `run` that these are of (default: the client's own, if it was named), `deadline_s` and
        `idempotent`.

        Raises NoReplicaError when no replica answered in time, RequestFailedError when the engine
        rejected the request.
        """
        return self.ask(COMPLETIONS, **_split(fields))

    def chat(self, **fields: Any) -> Answer:
        """POST /v1/chat/completions; see :meth:`completions`."""
        return self.ask(CHAT, **_split(fields))

    def ask(self, path: str, body: Mapping[str, Any], **options: Any) -> Answer:
        """POST `body` to `path` of some replica and wait for the answer."""
        return self._loop.call(self._core.ask(self._request(path, body, **options)))

    def map(
        self, bodies: Iterable[Mapping[str, Any]], path: str = COMPLETIONS, **options: Any
    ) -> list[Answer]:
        """The answers to all bodies, in order. The first error cancels the rest and is raised."""
        futures = [self.submit(path, body, **options) for body in bodies]
        try:
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def stream(self, path: str | None = None, **fields: Any) -> Stream:
        """A streamed answer: an iterator of events whose last one carries the versions.

        `path` is by default the chat route if there are `messages`, else the completions route.
        The deadline holds until the first event, and then from each event to the next. Replicas
        are changed only before the first event; later the iterator raises StreamBrokenError.
        """
        request = self._stream_request(path, fields)
        return Stream(self._loop, self._loop.call(self._core.open_stream(request)))

    # --- calls that do not wait ----------------------------------------------------------------

    def submit(
        self, path: str, body: Mapping[str, Any], **options: Any
    ) -> concurrent.futures.Future[Answer]:
        """Start a request. Cancelling the future closes its connection, which aborts it."""
        return self._loop.submit(self._core.ask(self._request(path, body, **options)))

    async def acomplete(self, **fields: Any) -> Answer:
        """:meth:`completions` for asynchronous callers."""
        return await self.aask(COMPLETIONS, **_split(fields))

    async def achat(self, **fields: Any) -> Answer:
        """:meth:`chat` for asynchronous callers."""
        return await self.aask(CHAT, **_split(fields))

    async def aask(self, path: str, body: Mapping[str, Any], **options: Any) -> Answer:
        """:meth:`ask` for asynchronous callers."""
        return await asyncio.wrap_future(self.submit(path, body, **options))

    async def astream(self, path: str | None = None, **fields: Any) -> AsyncStream:
        """:meth:`stream` for asynchronous callers."""
        request = self._stream_request(path, fields)
        opened = await asyncio.wrap_future(self._loop.submit(self._core.open_stream(request)))
        return AsyncStream(self._loop, opened)

    # --- the rest ------------------------------------------------------------------------------

    def replicas(self) -> list[ReplicaInfo]:
        """The replicas this client knows of, by id."""
        members = self._loop.call(self._core.members())
        return [_info(member) for member in sorted(members, key=lambda m: m.id)]

    def close(self) -> None:
        """Abort what is under way and free everything. Later calls raise UsageError."""
        self._loop.close(self._core.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _request(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        min_version: int | None = None,
        exact_version: int | None = None,
        run: str | None = None,
        deadline_s: float | None = None,
        idempotent: bool = True,
    ) -> Request:
        return make_request(
            path,
            body,
            min_version=min_version,
            exact_version=exact_version,
            run=self._named_run if run is None else run,
            deadline_s=self.settings.deadline_s if deadline_s is None else deadline_s,
            idempotent=idempotent,
        )

    def _stream_request(self, path: str | None, fields: dict[str, Any]) -> Request:
        chosen = path or (CHAT if "messages" in fields else COMPLETIONS)
        return self._request(chosen, **_split(fields))


OPTIONS = ("min_version", "exact_version", "run", "deadline_s", "idempotent")


def _split(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The client's own options, and the rest as `body`."""
    options = {name: fields[name] for name in OPTIONS if name in fields}
    body = {name: value for name, value in fields.items() if name not in OPTIONS}
    return {**options, "body": body}


def _info(member: Member) -> ReplicaInfo:
    beat = member.beat
    return ReplicaInfo(
        id=member.id,
        url=beat.url,
        run=beat.run,
        region=beat.region,
        state=beat.state,
        applied=member.applied,
        ready=beat.ready,
        reason=beat.reason,
        alive=not member.stale,
        outstanding=member.outstanding,
        aside_s=max(0.0, member.aside_until_s - time.monotonic()),
        last_answer=member.last_answer,
    )
