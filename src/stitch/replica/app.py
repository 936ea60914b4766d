"""Wiring of one replica: HTTP face, reconciler, watchdog, heartbeats around one engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine

from aiohttp import web

from stitch.board import Board, Run
from stitch.errors import EngineError
from stitch.replica.answers import error_answer
from stitch.replica.committer import Committer
from stitch.replica.config import ReplicaConfig
from stitch.replica.endpoints import Endpoints
from stitch.replica.engine_http import EngineClient
from stitch.replica.gate import Gate
from stitch.replica.heartbeats import HeartbeatWriter
from stitch.replica.hosts import EngineHost
from stitch.replica.proxy import Proxy
from stitch.replica.reconciler import Reconciler
from stitch.replica.replica_metrics import ReplicaMetrics
from stitch.replica.rotation import Rotation
from stitch.replica.routes import RouteKind, RouteTable
from stitch.replica.state import ReplicaStatus
from stitch.replica.watchdog import Watchdog
from stitch.replica.worker import Worker
from stitch.types import ReplicaState

log = logging.getLogger("stitch.replica")


class ReplicaApp:
    """One replica. `listening()` opens its port; `reconcile()` runs it until something is fatal."""

    def __init__(self, config: ReplicaConfig, host: EngineHost) -> None:
        self.config = config
        self.status = ReplicaStatus(replica=config.name_at(config.port), max_lag=config.lag_limit)
        self.url = config.url_at(config.port)
        self._host = host
        self._wake = asyncio.Event()
        self._worker = Worker("stitch-replica")
        self.gate = Gate(self.status, self.wake, max_wait_s=config.gate_wait_s)
        self.metrics = ReplicaMetrics(self.status, self.gate)
        self._client = EngineClient(host.base_url, vouch=self._vouch)
        self._proxy = Proxy(
            self.status,
            self.gate,
            self.metrics,
            self._client,
            max_body_bytes=config.max_body_bytes,
            on_engine_trouble=self._engine_trouble,
        )
        self._endpoints = Endpoints(
            self.status,
            self.metrics,
            wake=self.wake,
            verify=self.verify,
            admin_token=config.admin_token,
        )
        self._blocked: tuple[str, ...] = ()
        self._routes = RouteTable(self._endpoints.paths)
        self.reconciler = Reconciler(config, self.status, self.metrics, self._worker, self._wake)
        self._run: Run | None = None
        self._committer: Committer | None = None
        self._watchdog: Watchdog | None = None
        self._heartbeats: HeartbeatWriter | None = None

    # --- HTTP ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Look at the board at once."""
        self._wake.set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every request comes in here."""
        engine = self.status.engine
        if engine is not None and engine.blocked_routes != self._blocked:
            self._blocked = engine.blocked_routes
            self._routes = RouteTable(self._endpoints.paths, self._blocked)
        route = self._routes.route(request.raw_path)
        if route.kind is RouteKind.FORWARD:
            return await self._proxy.forward(request, route)
        if route.kind is RouteKind.OWN:
            return await self._endpoints.answer(request, route.path)
        self.metrics.requests.add(1.0, "403")
        return error_answer(
            403,
            "BlockedRoute",
            f"{route.path} controls the engine, or is spelled with dot segments: not served here",
        )

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Serve HTTP inside the block; yields the port."""
        server = web.Server(
            self.handle, handler_cancellation=True, access_log=None, max_field_size=64 * 1024,
            max_line_size=64 * 1024,
        )  # fmt: skip
        runner = web.ServerRunner(server, shutdown_timeout=self.config.drain_s)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.config.host, self.config.port, backlog=1024)
            await site.start()
            port = int(runner.addresses[0][1])
            self.status.replica = self.config.name_at(port)
            self.url = self.config.url_at(port)
            log.info("event=listening url=%s replica=%s", self.url, self.status.replica)
            yield port
        finally:
            await runner.cleanup()
            await self._client.close()

    # --- life ----------------------------------------------------------------------------------

    async def reconcile(self, board: Board) -> None:
        """Find the run, prove the engine, follow the board. Ends only by raising."""
        try:
            await self._host.begin()
            run = await self.reconciler.find_run(board)
            self._run = run
            heartbeats = HeartbeatWriter(
                run,
                self.status,
                url=self.url,
                region=self.config.region,
                interval_s=self.config.heartbeat_interval_s,
            )
            self._heartbeats = heartbeats
            self.reconciler.on_run = self._follow
            self.status.move(ReplicaState.BOOTING, "waiting for the engine")
            await first_failure(heartbeats.beat_forever(), self._live(run))
        except Exception as error:
            self.status.note_error(error)
            self.status.caught_up = False
            self.status.move(ReplicaState.FAILED, self.status.last_error)
            log.error("event=failed error=%s", self.status.last_error)
            raise

    def _follow(self, run: Run) -> None:
        """The engine serves versions of another run now."""
        self._run = run
        if self._heartbeats is not None:
            self._heartbeats.follow(run)

    async def _live(self, run: Run) -> None:
        engine = await self._host.ready(run)
        committer = Committer(
            engine, self.status, self.gate, resolve_budget_s=self.config.commit_resolve_s
        )
        self._committer = committer
        self._watchdog = Watchdog(
            self.status,
            committer,
            interval_s=self.config.watchdog_interval_s,
            down_budget_s=self.config.engine_down_budget_s,
            on_changed=self.reconciler.ask_reprove,
        )
        rotation = Rotation(
            self.status,
            committer,
            self.metrics,
            run.schema,
            # A stock engine can only say all it holds at once, and stands still meanwhile.
            interval_s=0.0 if self.config.reloads else self.config.proof_interval_s,
        )
        try:
            await first_failure(
                self._host.watch(),
                self._watchdog.watch(),
                rotation.prove_forever(),
                self.reconciler.run_forever(run, committer),
            )
        finally:
            await engine.close()

    async def _vouch(self) -> None:
        if self._watchdog is not None:
            await self._watchdog.vouch()

    def _engine_trouble(self) -> None:
        if self._watchdog is not None:
            self._watchdog.look_now()

    async def verify(self) -> dict[str, object]:
        """Recompute the digest of what the engine holds and compare it with the board's."""
        run, committer = self._run, self._committer
        if run is None or committer is None or self.status.applied is None:
            raise EngineError(f"nothing is served yet: {self.status.reason}")
        async with committer.lock:
            report = await committer.engine.verify()
        ref = report.ref
        if ref is None or ref.run != run.name:
            raise EngineError(
                f"the engine's weights are labelled {ref}, not a version of {run.name}"
            )
        expected = run.record.base_digest
        if ref.version > 0:
            manifest = await asyncio.to_thread(run.manifest, ref.version)
            expected = manifest.digest_after
        return {
            "run": ref.run,
            "version": ref.version,
            "digest": report.digest,
            "board_digest": expected,
            "equal": report.digest == expected,
            "tensors": dict(report.tensors),
            "seconds_s": report.seconds_s,
        }

    async def withdraw(self) -> None:
        """Leave the board, before the last requests are seen out, so that no new ones come."""
        if self._heartbeats is not None:
            await self._heartbeats.remove()

    async def close(self, *, failed: bool) -> None:
        """End the worker; a replica that FAILED says so, and why, on the board."""
        await self._worker.close()
        if failed and self._heartbeats is not None:
            await self._heartbeats.beat()


async def first_failure(*work: Coroutine[object, object, None]) -> None:
    """Run everything until one part fails (or ends), then cancel the rest; raises the failure."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
