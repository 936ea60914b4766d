"""Streamed answers: events as they come, versions at the end, one replica once output is seen."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from client_fakes import Site, events, status, wait_until
from hypothesis import given
from hypothesis import strategies as st

from stitch.client.events import sse_data
from stitch.errors import NoReplicaError, RequestFailedError, StreamBrokenError

TOKENS = [{"choices": [{"index": 0, "text": text}]} for text in "abc"]
VERSIONS = {
    "object": "stitch.versions",
    "choices": [],
    "weight_version_start": 5,
    "weight_version_end": 6,
    "weight_versions": [[]],
}


def test_events_come_in_order_and_end_with_the_versions(site: Site) -> None:
    fake = site.replica("a")
    fake.always = events(*TOKENS, VERSIONS, start=5)
    with site.client().stream(prompt="x", min_version=5) as stream:
        received = list(stream)
    assert received == [*TOKENS, VERSIONS]
    assert (stream.version_start, stream.version_end) == (5, 6)
    assert (stream.replica, stream.run, stream.attempts) == ("a", "run", 1)
    assert fake.requests[0].body == {"prompt": "x", "stream": True}
    assert fake.requests[0].headers["X-Stitch-Min-Version"] == "5"


def test_messages_go_to_the_chat_route(site: Site) -> None:
    fake = site.replica("a")
    fake.always = events(VERSIONS)
    list(site.client().stream(messages=[]))
    assert fake.requests[0].path == "/v1/chat/completions"


def test_events_arrive_before_the_stream_has_ended(site: Site) -> None:
    go_on = asyncio.Event()

    async def in_two_parts(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps(TOKENS[0])}\n\n".encode())
        await go_on.wait()
        await response.write(f"data: {json.dumps(VERSIONS)}\n\ndata: [DONE]\n\n".encode())
        return response

    fake = site.replica("a")
    fake.always = in_two_parts
    stream = site.client().stream(prompt="x")
    assert next(stream) == TOKENS[0]
    assert stream.version_end is None
    site.on_loop(go_on.set)
    assert next(stream) == VERSIONS
    assert next(stream, None) is None
    assert next(stream, None) is None


def test_closing_a_stream_aborts_the_generation(site: Site) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[]}\n\n')
        return await fake.hang(request)

    fake = site.replica("a")
    fake.always = endless
    client = site.client()
    stream = client.stream(prompt="x")
    next(stream)
    assert client.replicas()[0].outstanding == 1
    stream.close()
    wait_until(lambda: fake.aborted == 1, "the generation was aborted")
    assert client.replicas()[0].outstanding == 0
    assert next(stream, None) is None


@pytest.mark.parametrize("trouble", ["503", "no event", "error event", "hang up"])
def test_before_the_first_event_another_replica_is_asked(site: Site, trouble: str) -> None:
    fake = site.replica("a")
    first = {
        "503": status(503, Retry_After="0"),
        "no event": events(done=False),
        "error event": events({"error": {"message": "out of memory"}}),
        "hang up": fake.hang_up,
    }[trouble]
    fake.script.extend([first, events(*TOKENS, VERSIONS)])
    stream = site.client().stream(prompt="x")
    assert list(stream) == [*TOKENS, VERSIONS]
    assert stream.attempts == 2


def test_a_stream_that_breaks_off_later_is_not_sent_again(site: Site) -> None:
    fake = site.replica("a")
    fake.always = events(*TOKENS, done=False)
    stream = site.client().stream(prompt="x")
    assert [next(stream) for _ in TOKENS] == TOKENS
    with pytest.raises(StreamBrokenError, match=r"replica a broke off: it ended without \[DONE\]"):
        next(stream)
    assert len(fake.requests) == 1


def test_a_stream_that_goes_quiet_is_given_up(site: Site) -> None:
    async def quiet(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[]}\n\n')
        return await fake.hang(request)

    fake = site.replica("a")
    fake.always = quiet
    stream = site.client().stream(prompt="x")
    next(stream)
    stream._opened._gap_s = 0.3  # the deadline of a stream that began; until then it was long
    with pytest.raises(StreamBrokenError, match=r"no event for 0\.3 s"):
        next(stream)
    wait_until(lambda: fake.aborted == 1, "the generation was aborted")


def test_a_stream_nobody_begins_ends_at_the_deadline(site: Site) -> None:
    fake = site.replica("a")
    fake.always = fake.hang
    client = site.client()
    client.replicas()  # the board has been read, so the replica is asked at once
    with pytest.raises(NoReplicaError, match="no answer in time"):
        client.stream(prompt="x", deadline_s=0.3)


def test_an_answer_that_is_no_stream_is_rejected(site: Site) -> None:
    site.replica("a")
    with pytest.raises(RequestFailedError, match="stream request with application/json"):
        site.client().stream(prompt="x")


async def test_streams_can_be_read_asynchronously(site: Site) -> None:
    site.replica("a").always = events(*TOKENS, VERSIONS)
    async with await site.client().astream(prompt="x") as stream:
        received = [event async for event in stream]
    assert received == [*TOKENS, VERSIONS]
    assert stream.version_end == 6


@given(st.data())
def test_events_are_the_same_however_the_bytes_are_cut(data: st.DataObject) -> None:
    raw = (
        b": a comment\n\ndata: one\n\nevent: x\nid: 3\ndata: two\ndata:three\r\n\r\n"
        b"data: \xc3\xa9\n\n\n\ndata: [DONE]\n\ndata: left over"
    )
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=12).map(sorted))
    edges = [0, *cuts, len(raw)]

    async def chunks() -> AsyncIterator[bytes]:
        for start, stop in itertools.pairwise(edges):
            yield raw[start:stop]

    async def collected() -> list[str]:
        return [event async for event in sse_data(chunks())]

    assert asyncio.run(collected()) == ["one", "two\nthree", "é", "[DONE]"]
