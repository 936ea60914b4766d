"""What passes between client and engine, against a scripted upstream."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from replica_kit import (
    DEADLINE_S,
    Asked,
    Upstream,
    answer,
    description,
    front_of,
    raw_exchange,
    says,
    until,
)

from stitch.errors import EngineUnreachableError
from stitch.replica.engine_http import EngineClient
from stitch.replica.stamps import stamp_event
from stitch.types import ReplicaState, VersionRef

COMPLETIONS = "/v1/completions"


async def test_a_json_answer_carries_both_versions_in_body_and_headers() -> None:
    async with front_of(says(answer())) as (_, client), client.post(COMPLETIONS, json={}) as got:
        body = await got.read()
        assert json.loads(body) == {
            "text": "hi",
            "weight_version_start": 5,
            "weight_version_end": 5,
            "weight_run": "r",
        }
        assert got.headers["X-Stitch-Version-Start"] == "5"
        assert got.headers["X-Stitch-Version-End"] == "5"
        assert got.headers["X-Stitch-Run"] == "r"
        assert got.headers["Content-Length"] == str(len(body))


async def test_errors_of_the_engine_pass_with_their_status_and_are_stamped_too() -> None:
    upstream = says(answer(b'{"error":{"code":418}}', status="418 I'm a teapot"))
    async with front_of(upstream) as (_, client), client.post(COMPLETIONS, json={}) as got:
        assert got.status == 418
        assert got.reason == "I'm a teapot"
        assert (await got.json())["error"] == {"code": 418}
        assert got.headers["X-Stitch-Version-Start"] == "5"


async def test_the_constraint_does_not_reach_the_engine_and_the_salt_does() -> None:
    upstream = says(answer())
    async with front_of(upstream) as (_, client):
        body = {"prompt": "x", "weight_version": {"min_version": 5}}
        headers = {"X-Stitch-Min-Version": "5", "Authorization": "Bearer k", "X-Mine": "é"}
        async with client.post(COMPLETIONS, json=body, headers=headers) as got:
            assert got.status == 200
    (asked,) = upstream.asked
    assert json.loads(asked.body) == {"prompt": "x", "cache_salt": "stitch.r.5"}
    assert "x-stitch-min-version" not in asked.fields
    assert asked.fields["authorization"] == "Bearer k"
    assert asked.fields["accept-encoding"] == "identity"
    assert asked.fields["content-length"] == str(len(asked.body))


async def test_routes_that_do_not_generate_get_no_salt() -> None:
    upstream = says(answer())
    async with front_of(upstream) as (_, client), client.post("/tokenize", json={"a": 1}):
        pass
    assert json.loads(upstream.asked[0].body) == {"a": 1}


async def test_hop_by_hop_headers_stay_on_their_hop() -> None:
    upstream = says(
        answer(headers="Keep-Alive: timeout=5\r\nConnection: X-Hop\r\nX-Hop: 1\r\nX-End: 2\r\n")
    )
    async with front_of(upstream) as (_, client):
        headers = {"TE": "trailers", "Connection": "X-Private", "X-Private": "1", "X-Public": "2"}
        async with client.get("/v1/models", headers=headers) as got:
            assert "Keep-Alive" not in got.headers
            assert "X-Hop" not in got.headers
            assert got.headers["X-End"] == "2"
    fields = upstream.asked[0].fields
    assert not {"te", "x-private", "connection"} & fields.keys()
    assert fields["x-public"] == "2"


async def test_targets_cross_exactly_as_written() -> None:
    upstream = says(answer())
    async with front_of(upstream) as (app, _):
        target = b"/v1/files/a%2Fb%20c?x=%26&y=z+1"
        request = b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert (await raw_exchange(app, request)).startswith(b"HTTP/1.1 200")
    assert upstream.asked[0].head.split(b" ")[1] == target


async def test_a_gzip_body_goes_through_untouched() -> None:
    packed = gzip.compress(b'{"text":"hi"}')
    upstream = says(answer(packed, headers="Content-Encoding: gzip\r\n"))
    async with front_of(upstream) as (_, client), client.post(COMPLETIONS, json={}) as got:
        assert await got.read() == packed
        assert got.headers["Content-Encoding"] == "gzip"
        assert got.headers["X-Stitch-Version-Start"] == "5"


async def test_a_compressed_request_is_unpacked_and_its_constraint_seen() -> None:
    upstream = says(answer())
    packed = gzip.compress(b'{"weight_version":{"min_version":9}}')
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with front_of(upstream) as (_, client):
        async with client.post(COMPLETIONS, data=packed, headers=headers) as got:
            assert got.status == 409
        packed = gzip.compress(b'{"prompt":"x"}')
        async with client.post("/tokenize", data=packed, headers=headers) as got:
            assert got.status == 200
    assert upstream.asked[0].body == b'{"prompt":"x"}'
    assert "content-encoding" not in upstream.asked[0].fields


async def test_a_head_request_gets_headers_and_no_body() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n"
    async with front_of(says(head)) as (_, client):
        for _ in range(2):
            async with client.head("/v1/models") as got:
                assert got.status == 200
                assert got.headers["Content-Length"] == "13"


async def test_bodies_over_the_limit_are_refused_and_large_ones_below_it_pass() -> None:
    upstream = says(answer())
    async with front_of(upstream, max_body_bytes=5 * 2**20) as (_, client):
        async with client.post(COMPLETIONS, data=io.BytesIO(b"x" * (5 * 2**20 + 1))) as got:
            assert got.status == 413
        async with client.post(COMPLETIONS, data=io.BytesIO(b"y" * (5 * 2**20))) as got:
            assert got.status == 200
    assert upstream.asked[-1].body == b"y" * (5 * 2**20)


async def test_a_client_that_waits_for_100_continue_gets_it() -> None:
    async with front_of(says(answer())) as (app, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(app.url).port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
        writer.write(head + b"Connection: close\r\nContent-Length: 2\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"{}")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()


# --- constraints -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "headers", "status", "reason"),
    [
        ({"min_version": 5}, {}, 200, None),
        ({"min_version": 6}, {}, 409, "behind"),
        ({"exact_version": 5}, {}, 200, None),
        ({"exact_version": 4}, {}, 409, "ahead"),
        ({"exact_version": 6}, {}, 409, "behind"),
        (None, {"X-Stitch-Min-Version": "6"}, 409, "behind"),
        (None, {"X-Stitch-Exact-Version": "5"}, 200, None),
        ({"min_version": 5}, {"X-Stitch-Min-Version": "5"}, 200, None),
        ({"min_version": 5}, {"X-Stitch-Min-Version": "4"}, 400, None),
        (None, {"X-Stitch-Min-Version": "05"}, 400, None),
        (None, {"X-Stitch-Min-Version": "v5"}, 400, None),
        (None, {"X-Stitch-Min-Version": "1", "X-Stitch-Exact-Version": "1"}, 400, None),
        ({"min_version": "5"}, {}, 400, None),
        ("5", {}, 400, None),
    ],
)
async def test_constraints_are_held(
    body: Any, headers: dict[str, str], status: int, reason: str | None
) -> None:
    upstream = says(answer())
    async with front_of(upstream) as (app, client):
        data = {} if body is None else {"weight_version": body}
        async with client.post(COMPLETIONS, json=data, headers=headers) as got:
            assert got.status == status
            if status == 400:
                assert (await got.json())["error"]["type"] == "ConstraintError"
            if status == 409:
                error = (await got.json())["error"]
                assert error["type"] == "WeightVersionNotReady"
                assert error["reason"] == reason
                assert error["applied"] == 5
                assert error["target_version"] in (4, 6)
                assert int(got.headers["Retry-After"]) >= 1
        assert len(upstream.asked) == (status == 200)
        assert app._wake.is_set() is (reason == "behind")


async def test_a_version_that_no_route_leads_to_is_a_gap() -> None:
    async with front_of(says(answer())) as (app, client):
        app.status.blocked = "version 6: CorruptBlobError: flipped"
        async with client.get("/v1/models", headers={"X-Stitch-Min-Version": "6"}) as got:
            error = (await got.json())["error"]
            assert (got.status, error["reason"]) == (409, "gap")
            assert "CorruptBlobError" in error["message"]


async def test_before_it_serves_anything_constrained_requests_hear_booting_and_others_503() -> None:
    async with front_of(says(answer())) as (app, client):
        app.status.caught_up = False
        app.status.move(ReplicaState.CATCHING_UP, "fetching version 5")
        async with client.get("/v1/models", headers={"X-Stitch-Min-Version": "1"}) as got:
            assert (got.status, (await got.json())["error"]["reason"]) == (409, "booting")
        async with client.get("/v1/models") as got:
            assert got.status == 503
            assert (await got.json())["error"]["type"] == "ReplicaNotReady"
            assert "Retry-After" in got.headers


async def test_an_answer_that_the_engine_began_on_another_version_becomes_a_409() -> None:
    stamped = answer(
        b'{"weight_version_start":6,"weight_version_end":6}',
        headers="X-Stitch-Version-Start: 6\r\n",
    )
    async with front_of(says(stamped)) as (_, client):
        for body, status in (({"exact_version": 5}, 409), ({"min_version": 5}, 200)):
            async with client.post(COMPLETIONS, json={"weight_version": body}) as got:
                assert got.status == status


async def test_an_engines_own_stamps_are_passed_on() -> None:
    body = b'{"a":1,"weight_version_start":4,"weight_version_end":6}'
    stamped = answer(body, headers="X-Stitch-Version-Start: 4\r\n")
    async with front_of(says(stamped)) as (_, client), client.post(COMPLETIONS, json={}) as got:
        assert await got.read() == body[:-1] + b',"weight_run":"r"}'
        assert got.headers.getall("X-Stitch-Version-Start") == ["4"]
        assert got.headers.getall("X-Stitch-Version-End") == ["6"]


async def test_a_request_waits_for_a_commit_and_runs_on_the_version_after_it() -> None:
    upstream = says(answer())
    async with front_of(upstream) as (app, client):
        async with app.gate.closed():
            request = asyncio.create_task(client.post(COMPLETIONS, json={}))
            await until(lambda: app.gate.num_waiting == 1)
            assert not upstream.asked
            app.status.applied = 6
        async with await request as got:
            assert (await got.json())["weight_version_start"] == 6


async def test_a_commit_that_takes_too_long_is_answered_503() -> None:
    async with (
        front_of(says(answer()), gate_wait_s=0.01) as (app, client),
        app.gate.closed(),
        client.post(COMPLETIONS, json={}) as got,
    ):
        assert got.status == 503
        assert "Retry-After" in got.headers


async def test_an_answer_that_ends_during_a_commit_is_stamped_with_what_the_commit_leads_to() -> (
    None
):
    release = asyncio.Event()

    async def script(_: Asked, __: Any, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(answer())

    upstream = Upstream(script)
    async with front_of(upstream) as (app, client):
        request = asyncio.create_task(client.post(COMPLETIONS, json={}))
        await until(lambda: upstream.asked)
        async with app.gate.closed():
            release.set()
            await until(lambda: app.gate.num_waiting == 1)
            app.status.applied = 6
        async with await request as got:
            body = await got.json()
            assert (body["weight_version_start"], body["weight_version_end"]) == (5, 6)


# --- streams ---------------------------------------------------------------------------------

SSE = (
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    "Transfer-Encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def test_a_stream_is_passed_on_as_it_comes_and_ends_with_both_versions() -> None:
    step = asyncio.Semaphore(0)

    async def script(_: Asked, __: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE.encode())
        for data in (b'data: {"a":1}\n\n', b'data: {"a":2}\n\n', b"data: [DONE]\n\n"):
            writer.write(chunk(data))
            await writer.drain()
            await step.acquire()
        writer.write(b"0\r\n\r\n")

    async with (
        front_of(Upstream(script)) as (app, client),
        client.post(COMPLETIONS, json={"stream": True}) as got,
    ):
        assert got.headers["X-Accel-Buffering"] == "no"
        assert got.headers["Cache-Control"] == "no-cache"
        assert got.headers["X-Stitch-Version-Start"] == "5"
        assert "X-Stitch-Version-End" not in got.headers
        assert "Content-Length" not in got.headers
        # The upstream sends nothing more until what it sent has arrived here.
        assert await got.content.readuntil(b"\n\n") == b'data: {"a":1}\n\n'
        step.release()
        assert await got.content.readuntil(b"\n\n") == b'data: {"a":2}\n\n'
        app.status.applied = 6
        step.release()
        step.release()
        assert (
            await got.content.read()
            == stamp_event(VersionRef("r", 5), VersionRef("r", 6)) + b"data: [DONE]\n\n"
        )


@pytest.mark.parametrize("eol", [b"\n", b"\r\n"])
async def test_a_stream_in_single_bytes_is_the_same_stream(eol: bytes) -> None:
    stream = b": hi|id: 1|event: x|data: a|data: b||data: [DONE]||".replace(b"|", eol)

    async def script(_: Asked, __: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE.encode())
        for i in range(len(stream)):
            writer.write(chunk(stream[i : i + 1]))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async with front_of(Upstream(script)) as (_, client), client.post(COMPLETIONS, json={}) as got:
        text = await got.read()
    assert text.replace(stamp_event(VersionRef("r", 5), VersionRef("r", 5)), b"") == stream
    assert stamp_event(VersionRef("r", 5), VersionRef("r", 5)) + b"data: [DONE]" in text


async def test_a_compressed_stream_is_not_looked_into() -> None:
    packed = gzip.compress(b"data: [DONE]\n\n")
    upstream = says(answer(packed, "text/event-stream", headers="Content-Encoding: gzip\r\n"))
    async with front_of(upstream) as (_, client), client.post(COMPLETIONS, json={}) as got:
        assert await got.read() == packed


async def test_a_stream_that_breaks_off_does_not_look_complete() -> None:
    async def script(_: Asked, __: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE.encode() + chunk(b'data: {"a":1}\n\n'))
        await writer.drain()
        writer.transport.abort()

    async with front_of(Upstream(script)) as (app, _):
        request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
        try:
            got = await raw_exchange(app, request)
        except ConnectionResetError:
            return
    assert not got.endswith(b"0\r\n\r\n")


# --- disconnects -----------------------------------------------------------------------------


async def test_a_client_that_leaves_before_the_first_byte_closes_the_engines_connection() -> None:
    async def script(_: Asked, reader: asyncio.StreamReader, __: Any) -> None:
        await reader.read()  # answers nothing until the proxy goes away

    upstream = Upstream(script)
    async with front_of(upstream) as (app, client):
        request = asyncio.create_task(client.post(COMPLETIONS, json={}))
        await until(lambda: upstream.asked)
        request.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await upstream.gone.wait()
        await until(lambda: app.metrics.in_flight == 0)
        assert app.metrics.requests.value("cancelled") == 1


async def test_a_client_that_leaves_mid_stream_closes_the_engines_connection() -> None:
    async def script(_: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE.encode() + chunk(b"data: 1\n\n"))
        await writer.drain()
        await reader.read()

    upstream = Upstream(script)
    async with front_of(upstream) as (app, client):
        got = await client.post(COMPLETIONS, json={"stream": True})
        await got.content.readuntil(b"\n\n")
        got.close()
        async with asyncio.timeout(DEADLINE_S):
            await upstream.gone.wait()
        await until(lambda: app.metrics.in_flight == 0)


async def test_a_client_that_leaves_while_it_is_queued_never_reaches_the_engine() -> None:
    upstream = says(answer())
    async with front_of(upstream) as (app, client):
        async with app.gate.closed():
            request = asyncio.create_task(client.post(COMPLETIONS, json={}))
            await until(lambda: app.gate.num_waiting == 1)
            request.cancel()
            await until(lambda: app.metrics.in_flight == 0)
        assert app.gate.num_waiting == 0
    assert not upstream.asked


# --- the engine's end ------------------------------------------------------------------------


async def test_an_engine_that_is_not_there_is_a_502() -> None:
    async with (
        front_of("http://127.0.0.1:9") as (_, client),
        client.post(COMPLETIONS, json={}) as got,
    ):
        assert got.status == 502
        assert (await got.json())["error"]["type"] == "EngineUnreachableError"


async def test_an_answer_that_makes_no_sense_is_a_502() -> None:
    async with (
        front_of(says(b"SMTP ready\r\n\r\n")) as (_, client),
        client.post(COMPLETIONS, json={}) as got,
    ):
        assert got.status == 502


async def test_a_json_answer_cut_short_is_a_502() -> None:
    async def script(_: Asked, __: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(answer()[:-4])
        writer.close()

    async with front_of(Upstream(script)) as (_, client), client.post(COMPLETIONS, json={}) as got:
        assert got.status == 502


async def test_a_body_cut_short_is_never_taken_for_a_whole_one() -> None:
    async def script(_: Asked, __: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(answer()[:-4])
        writer.close()

    async with Upstream(script).running() as url:
        client = EngineClient(url)
        got = await client.send("GET", "/", b"", b"")
        await until(lambda: got._connection.transport is None)
        assert got.whole() is None
        with pytest.raises(EngineUnreachableError, match="inside the answer"):
            await got.read()
        got.release()
        await client.close()


async def test_a_long_answer_waits_in_the_engine_when_nobody_reads_it() -> None:
    sent = 0

    async def script(_: Asked, __: Any, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: x/y\r\nContent-Length: 67108864\r\n\r\n")
        for _i in range(64):
            writer.write(b"x" * 2**20)
            await writer.drain()
            sent += 1

    async with Upstream(script).running() as url:
        client = EngineClient(url)
        got = await client.send("GET", "/", b"", b"")
        await until(lambda: got._connection._paused)
        assert sent < 64
        assert len(await got.read()) == 2**26
        got.release()
        assert len(client._idle) == 1
        await client.close()


async def test_connections_are_kept_and_a_stale_one_is_replaced() -> None:
    close_next = False

    async def script(_: Asked, __: Any, writer: asyncio.StreamWriter) -> None:
        if close_next:
            writer.transport.abort()
        else:
            writer.write(answer())

    upstream = Upstream(script)
    async with front_of(upstream) as (_, client):
        for _ in range(3):
            async with client.post(COMPLETIONS, json={}) as got:
                assert got.status == 200
        assert upstream.num_connections == 1
        close_next = True
        async with client.post(COMPLETIONS, json={}) as got:
            assert got.status == 502  # a new connection broke off as well
        assert upstream.num_connections == 2


async def test_many_requests_run_at_once() -> None:
    all_here = asyncio.Event()

    async def script(_: Asked, __: Any, writer: asyncio.StreamWriter) -> None:
        if len(upstream.asked) == 150:
            all_here.set()
        await all_here.wait()
        writer.write(answer())

    upstream = Upstream(script)
    async with front_of(upstream) as (app, _):
        request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        request += b"Content-Length: 2\r\n\r\n{}"
        got = await asyncio.gather(*(raw_exchange(app, request) for _ in range(150)))
    assert all(each.startswith(b"HTTP/1.1 200") for each in got)


# --- own and blocked routes ------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PATCH", "OPTIONS"])
async def test_control_routes_answer_403_whatever_the_method(method: str) -> None:
    upstream = says(answer())
    async with front_of(upstream) as (app, client):
        app.status.engine = description(blocked_routes=("/secret/*",))
        for path in ("/stitch/v1/commit", "/update_weights", "/secret/x"):
            async with client.request(method, path) as got:
                assert got.status == 403
                assert "controls the engine" in (await got.json())["error"]["message"]
    assert not upstream.asked


async def test_health_tells_why_it_is_not_ready_and_live_only_that_it_lives() -> None:
    async with front_of(says(answer()), max_lag=2) as (app, client):
        async with client.get("/health") as got:
            assert (got.status, (await got.json())["applied"]) == (200, 5)
        app.status.newest = 10
        app.status.blocked = "version 6: CorruptBlobError: flipped"
        async with client.get("/health") as got:
            assert got.status == 503
            assert (await got.json())["reason"] == (
                "5 versions behind: version 6: CorruptBlobError: flipped"
            )
        async with client.get("/live") as got:
            assert got.status == 200
        async with client.post(COMPLETIONS, json={}) as got:
            assert got.status == 200  # what it serves it goes on serving


async def test_server_info_and_metrics_and_wake() -> None:
    async with front_of(says(answer())) as (app, client):
        async with client.post(COMPLETIONS, json={}):
            pass
        async with client.get("/server_info") as got:
            info = await got.json()
            assert (info["run"], info["applied"], info["ready"]) == ("r", 5, True)
            assert info["engine"]["engine"] == "scripted"
        async with client.get("/metrics") as got:
            text = await got.text()
            assert got.content_type == "text/plain"
            assert "stitch_applied_version 5\n" in text
            assert 'stitch_requests_total{outcome="200"} 1\n' in text
            assert 'stitch_state{state="SERVING"} 1\n' in text
        async with client.get("/wake") as got:
            assert (got.status, got.headers["Allow"]) == (405, "POST")
        assert not app._wake.is_set()
        async with client.post("/wake") as got:
            assert got.status == 200
        assert app._wake.is_set()


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "text/plain"])
@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_answers_that_have_no_body_get_none(status: str, kind: str) -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n\r\n".encode()
    request = b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    async with front_of(says(head)) as (app, _):
        got, _, rest = (await raw_exchange(app, request)).partition(b"\r\n\r\n")
    assert got.startswith(f"HTTP/1.1 {status}".encode())
    assert b"content-length" not in got.lower()
    assert rest == b""


async def test_an_answer_that_switches_protocols_is_a_502() -> None:
    head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"
    async with front_of(says(head)) as (_, client), client.post(COMPLETIONS, json={}) as got:
        assert got.status == 502


async def test_a_version_that_is_no_number_of_a_version_is_not_believed() -> None:
    stamped = answer(headers=f"X-Stitch-Version-Start: {'9' * 5000}\r\n")
    async with front_of(says(stamped)) as (_, client), client.post(COMPLETIONS, json={}) as got:
        assert (got.status, got.headers["X-Stitch-Version-Start"]) == (200, "5")


@pytest.mark.parametrize(
    ("coding", "status"), [("gzip", 400), ("deflate", 400), ("foo", 415), ("gzip, gzip", 415)]
)
async def test_a_body_that_cannot_be_unpacked_is_refused(coding: str, status: int) -> None:
    upstream = says(answer())
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    async with (
        front_of(upstream) as (_, client),
        client.post(COMPLETIONS, data=b"\xff{}junk", headers=headers) as got,
    ):
        assert (got.status, got.content_type) == (status, "application/json")
    assert upstream.asked == []


@pytest.mark.parametrize("eol", [b"\n", b"\r\n"])
async def test_the_end_version_counts_when_the_last_event_is_cut_anywhere(eol: bytes) -> None:
    stream = b"data: a||data: [DONE]||".replace(b"|", eol)
    step = asyncio.Semaphore(0)

    async def script(_: Asked, __: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE.encode() + chunk(b"data: a" + eol + eol))
        await step.acquire()
        rest = stream[len(b"data: a" + eol + eol) :]
        for i in range(len(rest)):
            writer.write(chunk(rest[i : i + 1]))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    async with (
        front_of(Upstream(script)) as (app, client),
        client.post(COMPLETIONS, json={}) as got,
    ):
        await got.content.readuntil(b"\n")
        app.status.applied = 6
        step.release()
        assert (
            stamp_event(VersionRef("r", 5), VersionRef("r", 6)) + b"data: [DONE]"
            in await got.content.read()
        )


async def test_an_answer_that_ends_while_a_commit_is_in_doubt_is_not_stamped_too_narrow() -> None:
    release = asyncio.Event()

    async def script(_: Asked, __: Any, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(answer())

    upstream = Upstream(script)
    async with front_of(upstream, gate_wait_s=0.05) as (app, client):
        request = asyncio.create_task(client.post(COMPLETIONS, json={}))
        await until(lambda: upstream.asked)
        async with app.gate.closed():
            app.status.in_doubt = VersionRef("r", 6)
            release.set()
            async with await request as got:
                body = await got.json()
                assert (body["weight_version_start"], body["weight_version_end"]) == (5, 6)
