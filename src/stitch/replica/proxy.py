"""The reverse proxy: admit, forward, stamp.

One request takes this way: read the body, find its constraint, pass the gate, put the cache salt
in, send it to the engine, and send the answer back with the versions it began and ended on. JSON
answers are collected and stamped; event streams and everything else pass through as they arrive.
A client that leaves cancels the handler, which closes the engine's connection at once.

Chosen by measurement: see "Proxy" in docs/benchmarks.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from aiohttp import web

from stitch.errors import ConstraintError, EngineUnreachableError
from stitch.replica import headers as hdr
from stitch.replica.answers import broken_start_answer, error_answer, refusal_answer
from stitch.replica.body import NO_CONSTRAINT, RequestBody, merge_constraints, read_body
from stitch.replica.engine_http import EngineAnswer, EngineClient
from stitch.replica.framing import Head, has_no_body
from stitch.replica.gate import Gate, NotAdmittedError
from stitch.replica.raw_answer import RawAnswer
from stitch.replica.replica_metrics import ReplicaMetrics
from stitch.replica.routes import Route
from stitch.replica.salt import salted
from stitch.replica.stamps import (
    StreamStamper,
    is_stamped,
    stamp_json,
    stamp_run,
    stamped_end,
)
from stitch.replica.state import ReplicaStatus, version_ref
from stitch.types import VersionConstraint, VersionRef

log = logging.getLogger("stitch.replica.proxy")

DECODED_CODINGS = frozenset({"", "identity", "gzip", "deflate", "br", "zstd"})
"""Content codings that the server undoes, or refuses itself where it lacks the library."""


class BodyTooLargeError(Exception):
    """A request body over the configured limit."""


class UnknownCodingError(Exception):
    """A Content-Encoding that is not undone here, so that what the body demands stays unread."""


class Proxy:
    """Forwards requests to one engine. `forward` is its one entry."""

    def __init__(
        self,
        status: ReplicaStatus,
        gate: Gate,
        metrics: ReplicaMetrics,
        client: EngineClient,
        *,
        max_body_bytes: int,
        on_engine_trouble: Callable[[], None] = lambda: None,
    ) -> None:
        self._status = status
        self._gate = gate
        self._metrics = metrics
        self._client = client
        self._max_body_bytes = max_body_bytes
        self._on_engine_trouble = on_engine_trouble

    async def forward(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        """The engine's answer, or one that says why there is none."""
        started_s = time.perf_counter()
        metrics = self._metrics
        metrics.in_flight += 1
        outcome = "cancelled"
        try:
            answer = await self._admitted(request, route)
            outcome = str(answer.status)
            return answer
        finally:
            metrics.in_flight -= 1
            metrics.requests.add(1.0, outcome)
            metrics.request_s.observe(time.perf_counter() - started_s)

    async def _admitted(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        constraint = VersionConstraint()
        try:
            data = await read_request(request, self._max_body_bytes)
            body = read_body(data, self._salt_field(route))
            constraint = merge_constraints(body.constraint, header_constraint(request))
            ref = await self._gate.admit(constraint)
        except ConstraintError as error:
            return error_answer(400, "ConstraintError", str(error))
        except BodyTooLargeError as error:
            return error_answer(413, "BodyTooLargeError", str(error))
        except UnknownCodingError as error:
            return error_answer(415, "UnknownCodingError", str(error))
        except web.RequestPayloadError as error:
            return error_answer(400, "MalformedBodyError", " ".join(str(error).split()))
        except NotAdmittedError as refused:
            return refusal_answer(refused, constraint, self._status)
        return await self._exchange(request, route, body, constraint, ref)

    def _salt_field(self, route: Route) -> str | None:
        engine = self._status.engine
        return engine.salt_field if engine is not None and route.generates else None

    async def _exchange(
        self,
        request: web.BaseRequest,
        route: Route,
        body: RequestBody,
        constraint: VersionConstraint,
        ref: VersionRef,
    ) -> web.StreamResponse:
        field = self._salt_field(route)
        data = salted(body, field, ref) if field is not None else body.data
        try:
            upstream = await self._client.send(
                request.method, route.target, hdr.to_engine(request.raw_headers), data
            )
        except EngineUnreachableError as error:
            return self._unreachable(error)
        try:
            head = upstream.head
            start = self._as_ref(hdr.version(head, hdr.ENGINE_START), ref, at_end=False) or ref
            if constraint.unmet_by(start.version, start.run) is not None:
                return broken_start_answer(start, constraint, self._status)
            bodiless = has_no_body(request.method.encode("ascii"), head)
            if not bodiless and _is_plain(head):
                kind = head.content_type
                if kind == b"application/json" or kind.endswith(b"+json"):
                    return await self._stamped_json(upstream, ref, start)
                if kind == b"text/event-stream":
                    return await self._stream(request, upstream, ref, start, StreamStamper())
            return await self._stream(request, upstream, ref, start, None)
        finally:
            upstream.release()  # closed if not read to its end: the rest must not go on being made

    def _unreachable(self, error: EngineUnreachableError) -> web.Response:
        self._on_engine_trouble()
        return error_answer(502, "EngineUnreachableError", str(error), headers={"Retry-After": "1"})

    async def _stamped_json(
        self, upstream: EngineAnswer, ref: VersionRef, start: VersionRef
    ) -> web.StreamResponse:
        try:
            payload = upstream.whole()
            if payload is None:
                payload = await upstream.read()
        except EngineUnreachableError as error:
            return self._unreachable(error)
        number = hdr.version(upstream.head, hdr.ENGINE_END)
        by_engine = hdr.ENGINE_START in upstream.head.last and is_stamped(payload)
        if by_engine and number is None:
            number = stamped_end(payload)
        end = self._as_ref(number, ref, at_end=True)
        if by_engine:
            payload = stamp_run(payload, start, end or start) or payload
        else:
            end = end or await self._end(ref)
            payload = stamp_json(payload, start, end) or payload
        fields = hdr.to_client(upstream.head) + hdr.stamps(start, end)
        return RawAnswer(upstream.head.status, upstream.head.reason, fields, payload)

    async def _stream(
        self,
        request: web.BaseRequest,
        upstream: EngineAnswer,
        ref: VersionRef,
        start: VersionRef,
        stamper: StreamStamper | None,
    ) -> web.StreamResponse:
        head = upstream.head
        stamps = hdr.stamps(
            start, self._as_ref(hdr.version(head, hdr.ENGINE_END), ref, at_end=True)
        )
        out = hdr.as_text(hdr.to_client(head) + stamps)
        if head.content_type == b"text/event-stream":
            out["X-Accel-Buffering"] = "no"
            out["Cache-Control"] = "no-cache"
        length = head.get(b"content-length")
        if stamper is None and length is not None:
            out["Content-Length"] = length.decode()
        answer = web.StreamResponse(status=head.status, reason=head.reason, headers=out)
        await answer.prepare(request)
        if request.method == "HEAD":
            return answer
        try:
            async for chunk in upstream.chunks():
                if stamper is not None:
                    may_end = stamper.is_holding or b"]" in chunk
                    end = await self._end(ref) if may_end else ref
                    chunk = stamper.feed(chunk, start, end)
                if chunk:
                    await answer.write(chunk)
        except EngineUnreachableError as error:
            self._cut(request, error)
            return answer
        if stamper is not None and (rest := stamper.finish(start, await self._end(ref))):
            await answer.write(rest)
        return answer

    def _cut(self, request: web.BaseRequest, error: BaseException) -> None:
        """Break the client's connection, so that a broken stream does not look complete."""
        log.warning("event=stream_broken error=%r", error)
        self._on_engine_trouble()
        if request.transport is not None:
            request.transport.abort()

    def _as_ref(
        self, number: int | None, admitted: VersionRef, *, at_end: bool
    ) -> VersionRef | None:
        """A number that the engine stamped, with its run.

        Engines stamp numbers alone. Where the run has changed since the request was admitted, the
        live version's number is taken for that, unless the answer may have begun before.
        """
        if number is None:
            return None
        status, run = self._status, admitted.run
        if number == status.applied and (at_end or number != admitted.version):
            run = status.run or run
        return version_ref(run, number)

    async def _end(self, ref: VersionRef) -> VersionRef:
        """The version that is live now. During a commit it is known only after it, so wait.

        If it does not become known, the one that may be live: the range is never too narrow.
        """
        if self._gate.is_closed:
            await self._gate.settled()
        status = self._status
        live = [ref, status.in_doubt or ref]
        if status.run is not None and status.applied is not None:
            live.append(version_ref(status.run, status.applied))
        others = [one for one in live[1:] if one.run != ref.run]
        return max(live) if not others else others[0]


async def read_request(request: web.BaseRequest, max_bytes: int) -> bytes:
    """The whole body, decoded if it was compressed.

    Raises BodyTooLargeError, UnknownCodingError and, for broken bodies, RequestPayloadError.
    """
    if not request.can_read_body:
        return b""
    headers, content = request.headers, request.content
    if content.is_eof() and "Content-Encoding" not in headers:  # as nearly always: all is here
        data = content.read_nowait()
        if len(data) > max_bytes:
            raise BodyTooLargeError(
                f"the body has {len(data)} bytes; at most {max_bytes} are taken"
            )
        return data
    coding = headers.get("Content-Encoding", "").strip().lower()
    if coding not in DECODED_CODINGS:
        raise UnknownCodingError(f"bodies of Content-Encoding {coding[:40]!r} are not taken")
    length = request.content_length
    if length is not None and length > max_bytes:
        raise BodyTooLargeError(f"the body has {length} bytes; at most {max_bytes} are taken")
    if "Expect" in headers and headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    part = await content.readany()
    parts, size = [], 0
    while part:
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise BodyTooLargeError(f"the body has more than {max_bytes} bytes")
        part = await content.readany()
    return b"".join(parts)


def header_constraint(request: web.BaseRequest) -> VersionConstraint:
    """The constraint in X-Stitch-Min-Version, X-Stitch-Exact-Version and X-Stitch-Run; raises
    ConstraintError."""
    found = request.headers
    if hdr.MIN not in found and hdr.EXACT not in found and hdr.RUN not in found:
        return NO_CONSTRAINT
    for name in (hdr.MIN, hdr.EXACT, hdr.RUN):
        if len(found.getall(name, ())) > 1:
            raise ConstraintError(f"the header {name} is given more than once")
    return VersionConstraint.parse_headers(
        found.get(hdr.MIN), found.get(hdr.EXACT), found.get(hdr.RUN)
    )


def _is_plain(head: Head) -> bool:
    """Whether the payload's bytes are the content's; compressed ones are left alone."""
    coding = head.get(b"content-encoding")
    return coding is None or coding.lower() == b"identity"
