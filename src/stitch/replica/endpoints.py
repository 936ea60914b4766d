"""The replica's own endpoints: /live, /health, /server_info, /metrics, /wake, /verify."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from stitch.errors import EngineUnreachableError, StitchError
from stitch.replica import metrics as prometheus
from stitch.replica.answers import error_answer, json_answer
from stitch.replica.replica_metrics import ReplicaMetrics
from stitch.replica.state import ReplicaStatus

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Verify = Callable[[], Awaitable[dict[str, object]]]


class Endpoints:
    """Answers what is asked of the replica itself rather than of its engine."""

    def __init__(
        self,
        status: ReplicaStatus,
        metrics: ReplicaMetrics,
        *,
        wake: Callable[[], None],
        verify: Verify,
        admin_token: str | None,
    ) -> None:
        self._status = status
        self._metrics = metrics
        self._wake = wake
        self._verify = verify
        self._admin_token = admin_token
        self._verifying = asyncio.Lock()
        self._handlers: Mapping[str, tuple[tuple[str, ...], Handler]] = {
            "/live": (("GET", "HEAD"), self.live),
            "/health": (("GET", "HEAD"), self.health),
            "/server_info": (("GET", "HEAD"), self.server_info),
            "/metrics": (("GET", "HEAD"), self.metrics),
            "/wake": (("POST",), self.wake),
            "/verify": (("POST",), self.verify),
        }

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(self._handlers)

    async def answer(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        methods, handler = self._handlers[path]
        if request.method not in methods:
            return error_answer(
                405,
                "MethodNotAllowed",
                f"{path} takes {' or '.join(methods)}, not {request.method}",
                headers={"Allow": ", ".join(methods)},
            )
        return await handler(request)

    async def live(self, request: web.BaseRequest) -> web.Response:
        """The process lives; says nothing about readiness."""
        return json_answer({"status": "alive", "state": self._status.state.value})

    async def health(self, request: web.BaseRequest) -> web.Response:
        """200 only while this replica should get traffic."""
        status = self._status
        body = {
            "status": "ready" if status.ready else "not ready",
            "reason": status.reason,
            "state": status.state.value,
            "run": status.run,
            "applied": status.applied,
            "newest": status.newest,
            "lag": status.lag,
        }
        if status.ready:
            return json_answer(body)
        return json_answer(body, status=503, headers={"Retry-After": "1"})

    async def server_info(self, request: web.BaseRequest) -> web.Response:
        return json_answer(server_info(self._status))

    async def metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(
            body=self._metrics.text().encode(), headers={"Content-Type": prometheus.CONTENT_TYPE}
        )

    async def wake(self, request: web.BaseRequest) -> web.Response:
        """Look at the board now."""
        self._wake()
        status = self._status
        return json_answer(
            {"woken": True, "run": status.run, "applied": status.applied, "newest": status.newest}
        )

    async def verify(self, request: web.BaseRequest) -> web.Response:
        """Have the engine recompute its digest and compare it with the board's."""
        if not self._may_administer(request):
            return error_answer(
                401,
                "Unauthorized",
                "POST /verify is for this machine, or needs the admin token as bearer",
                headers={"WWW-Authenticate": "Bearer"},
            )
        async with self._verifying:
            try:
                return json_answer(await self._verify())
            except EngineUnreachableError as error:
                return error_answer(502, type(error).__name__, str(error))
            except StitchError as error:
                return error_answer(
                    503, type(error).__name__, str(error), headers={"Retry-After": "1"}
                )

    def _may_administer(self, request: web.BaseRequest) -> bool:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self._admin_token is not None:
            wanted = f"Bearer {self._admin_token}".encode()
            if hmac.compare_digest(given, wanted):
                return True
        return is_loopback(request.remote)


def is_loopback(address: str | None) -> bool:
    """Whether a peer address is this machine. False for what is not an address."""
    try:
        return address is not None and ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def server_info(status: ReplicaStatus) -> dict[str, object]:
    """Everything a person asks when a replica looks odd."""
    engine = None
    if status.engine is not None:
        engine = dataclasses.asdict(status.engine)
    return {
        "replica": status.replica,
        "boot": status.boot,
        "run": status.run,
        "state": status.state.value,
        "doing": status.doing,
        "applied": status.applied,
        "newest": status.newest,
        "lag": status.lag,
        "max_lag": status.max_lag,
        "ready": status.ready,
        "reason": status.reason,
        "blocked": status.blocked,
        "last_error": status.last_error,
        "engine": engine,
        "commits": [timing.to_json() for timing in status.commits],
    }
