"""One attempt over HTTP: send, read, and sort what came into answer, failure or rejection."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from stitch.client.answer import (
    RUN_HEADER,
    Answer,
    as_version,
    ended_run,
    loaded,
    stamped_versions,
)
from stitch.client.fleet import Fleet, Member
from stitch.client.request import AttemptFailed, Request, parse_retry_after
from stitch.client.settings import ClientConfig
from stitch.errors import RequestFailedError
from stitch.types import is_http_address

DEFAULT_ASIDE_S = 1.0
MAX_SHOWN = 500
ELSEWHERE = frozenset({502, 504})
BUSY = frozenset({429, 503})


class Exchange:
    """Sends requests over one aiohttp session and tells the fleet how each replica did."""

    def __init__(
        self, session: aiohttp.ClientSession, fleet: Fleet, settings: ClientConfig
    ) -> None:
        self._session = session
        self._fleet = fleet
        self._settings = settings

    async def ask(self, request: Request, member: Member, left_s: float, number: int) -> Answer:
        """One attempt at a whole answer."""
        started_s = self._fleet.now()
        try:
            async with asyncio.timeout(self.budget_s(left_s)):
                response = await self.post(request, member, started_s)
                async with response:
                    await self.check_status(request, member, response, started_s)
                    data = await response.read()
        except TimeoutError:
            raise self.timed_out(member, started_s) from None
        except aiohttp.ClientError as error:
            raise self.broke(member, error, started_s) from None
        body = _json_object(data, response, member)
        start, end = stamped_versions(body, response.headers)
        run = self.check_stamp(request, member, response, start)
        self._fleet.succeeded(member, end)
        member.last_answer = f"{response.status}"
        return Answer(
            body=body,
            version_start=start,
            version_end=end,
            run=run,
            run_end=ended_run(body, response.headers) or run,
            replica=member.id,
            attempts=number,
        )

    async def post(
        self, request: Request, member: Member, started_s: float
    ) -> aiohttp.ClientResponse:
        """Send; raise AttemptFailed if no response begins."""
        if not is_http_address(member.beat.url):
            self._fleet.failed(member, started_s)
            raise AttemptFailed(f"its address {member.beat.url!r:.200} is not an http(s) address")
        headers = dict(request.headers)
        if self._settings.token:
            headers["Authorization"] = f"Bearer {self._settings.token}"
        url = member.beat.url.rstrip("/") + request.path
        try:
            return await self._session.post(
                url, json=dict(request.body), headers=headers, allow_redirects=False
            )
        except aiohttp.ConnectionTimeoutError:
            self._fleet.failed(member, started_s)
            raise AttemptFailed("no connection in time") from None
        except aiohttp.ClientConnectorError as error:
            self._fleet.failed(member, started_s)
            raise AttemptFailed(f"cannot connect: {error.os_error.strerror or error}") from None

    async def check_status(
        self,
        request: Request,
        member: Member,
        response: aiohttp.ClientResponse,
        started_s: float,
    ) -> None:
        """Return for a 200; raise AttemptFailed or RequestFailedError for anything else."""
        status = response.status
        if status == 200:
            return
        text = (await response.read()).decode("utf-8", "replace")
        said = f"{status} {_message(text)}".rstrip()
        retry_after_s = parse_retry_after(response.headers.get("Retry-After"))
        if status == 409:
            member.learn(_applied(text, member.applied))
            raise AttemptFailed(said, retry_after_s=retry_after_s, unmet=True)
        if status in BUSY:
            aside_s = DEFAULT_ASIDE_S if retry_after_s is None else retry_after_s
            self._fleet.put_aside(member, aside_s)
            raise AttemptFailed(said, retry_after_s=retry_after_s)
        if status >= 500:
            self._fleet.failed(member, started_s)
            raise AttemptFailed(
                said,
                retry_after_s=retry_after_s,
                may_have_run=True,
                answered_error=status not in ELSEWHERE,
            )
        raise RequestFailedError(
            f"replica {member.id} answered {request.path} with {said}",
            status=status,
            body=text,
        )

    def check_stamp(
        self,
        request: Request,
        member: Member,
        response: aiohttp.ClientResponse,
        start: int | None,
    ) -> str | None:
        """The answer's run. One from another run, or begun on a version that the request did not
        allow, is no answer."""
        run = response.headers.get(RUN_HEADER) or member.beat.run
        wanted = request.constraint.run or member.beat.run
        if wanted is not None and run != wanted:
            raise AttemptFailed(f"answered for run {run!r}, not {wanted!r}", unmet=True)
        if start is None and request.constraint.target is not None:
            raise AttemptFailed("answered without saying on which version", unmet=True)
        reason = None if start is None else request.constraint.unmet_by(start, run)
        if reason is not None:
            member.learn(start)
            raise AttemptFailed(f"answered on version {start} ({reason})", unmet=True)
        return run

    def timed_out(self, member: Member, started_s: float) -> AttemptFailed:
        self._fleet.timed_out(member, started_s)
        return AttemptFailed("no answer in time", may_have_run=True, timed_out=True)

    def broke(self, member: Member, error: Exception, started_s: float) -> AttemptFailed:
        self._fleet.failed(member, started_s)
        said = str(error) or type(error).__name__
        return AttemptFailed(f"the connection broke: {said}", may_have_run=True)

    def budget_s(self, left_s: float) -> float:
        """Seconds that one attempt may take."""
        limit_s = self._settings.attempt_timeout_s
        return left_s if limit_s is None else min(left_s, limit_s)


def _json_object(data: bytes, response: aiohttp.ClientResponse, member: Member) -> dict[str, Any]:
    body = loaded(data)
    if not isinstance(body, dict):
        raise RequestFailedError(
            f"replica {member.id} answered 200 but not with a JSON object: "
            f"{data[:MAX_SHOWN].decode('utf-8', 'replace')!r}",
            status=response.status,
            body=data.decode("utf-8", "replace"),
        )
    return body


def _message(text: str) -> str:
    """The message of an error body, in whichever of the usual places it is."""
    body = loaded(text)
    if body is None:
        return text[:MAX_SHOWN]
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        parts = [error.get(key) for key in ("type", "reason", "message")]
        shown = " ".join(str(part) for part in parts if part)
        if "applied" in error:
            shown += f" (applied {error['applied']}, target {error.get('target_version')})"
        return shown[:MAX_SHOWN] or text[:MAX_SHOWN]
    return str(error)[:MAX_SHOWN]


def _applied(text: str, known: int | None) -> int | None:
    """The version that a 409 says the replica serves."""
    body = loaded(text)
    error = body.get("error") if isinstance(body, dict) else None
    applied = as_version(error.get("applied")) if isinstance(error, dict) else None
    return known if applied is None else applied
