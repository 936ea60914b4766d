"""Stamps in JSON answers and event streams, however the bytes are cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.replica.stamps import (
    StreamStamper,
    is_stamped,
    stamp_event,
    stamp_json,
    stamp_run,
    stamped_end,
)
from stitch.types import VersionRef

R3, R4 = VersionRef("r", 3), VersionRef("r", 4)
STAMP = stamp_event(R3, R4)
FRAMES = {
    "plain": b'data: {"a":1}\n\ndata: {"a":2}\n\n',
    "crlf": b'data: {"a":1}\r\n\r\ndata: {"a":2}\r\n\r\n',
    "old mac": b'data: {"a":1}\r\rdata: {"a":2}\r\r',
    "fields": b': ping\n\nid: 1\nevent: x\ndata: {"a":1}\n\nretry: 5\n\nid: 2\ndata: {"a":2}\n\n',
    "several lines": b"data: one\ndata: [DONE]x\ndata: three\n\n",
    "blank lines": b'\n\n\ndata: {"a":1}\n\n\n\n',
    "looks alike": b'data: [DONE] not\n\ndatabase: x\n\ndata:\n\ndat\n\ndata: "[DONE]"\n\n',
}
ENDS = [
    b"data: [DONE]\n\n",
    b"data: [DONE]\r\n\r\n",
    b"data:[DONE]\n\n",
    b"id: 9\nevent: end\ndata: [DONE]\n\n",
    b"data: [DONE]",
    b"data: [DONE]\n\n: bye\n\n",
]


def through(pieces: list[bytes]) -> bytes:
    stamper = StreamStamper()
    out = [stamper.feed(piece, R3, R4) for piece in pieces]
    return b"".join(out) + stamper.finish(R3, R4)


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_the_stamp_goes_right_before_the_done_event(frame: str, end: bytes, size: int) -> None:
    stream = FRAMES[frame] + end
    pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert through(pieces) == FRAMES[frame] + STAMP + end


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("size", [1, 10_000])
def test_without_a_done_event_the_stamp_comes_last(frame: str, size: int) -> None:
    stream = FRAMES[frame]
    pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert through(pieces) == stream + STAMP


def test_a_stream_that_ends_inside_an_event_gets_the_event_ended_first() -> None:
    assert through([b"data: x"]) == b"data: x\n\n" + STAMP
    assert through([b"id: 1"]) == b"id: 1\n\n" + STAMP
    assert through([]) == STAMP


@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_nothing_is_added_to_a_stream_that_the_engine_stamped(size: int) -> None:
    stream = FRAMES["plain"] + stamp_event(VersionRef("r", 1), VersionRef("r", 2)) + ENDS[0]
    assert through([stream[i : i + size] for i in range(0, len(stream), size)]) == stream


@pytest.mark.parametrize("event", [b'data: {"a":1}\n\n', b'id: 4\ndata: {"a":1}\r\n\r\n'])
def test_an_event_is_passed_on_the_moment_it_is_complete(event: bytes) -> None:
    stamper = StreamStamper()
    for _ in range(3):
        assert stamper.feed(event, R3, R3) == event


def test_data_is_passed_on_as_soon_as_it_cannot_be_the_end() -> None:
    stamper = StreamStamper()
    assert stamper.feed(b"data: ", R3, R3) == b""
    assert stamper.feed(b'{"a', R3, R3) == b'data: {"a'
    assert stamper.feed(b'":1}', R3, R3) == b'":1}'


def test_only_a_little_is_ever_held_back() -> None:
    stamper = StreamStamper()
    sent = sum(len(stamper.feed(b": comment without an end ", R3, R3)) for _ in range(10_000))
    assert sent > 240_000 - 66_000


@given(
    events=st.lists(st.sampled_from([*FRAMES.values(), b"data: x\n\n", b": c\n\n"]), max_size=4),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    end=st.sampled_from(ENDS),
)
def test_every_cut_gives_the_same_bytes(events: list[bytes], cuts: list[int], end: bytes) -> None:
    stream = b"".join(events) + end
    borders = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in itertools.pairwise(borders)]
    assert through(pieces) == b"".join(events) + STAMP + end


def test_json_gets_both_versions_as_its_last_members() -> None:
    stamped = stamp_json(b'{"text":"}"} \n', R3, R4)
    assert stamped is not None
    assert json.loads(stamped) == {
        "text": "}",
        "weight_version_start": 3,
        "weight_version_end": 4,
        "weight_run": "r",
    }
    assert stamp_json(b"[1]", R3, R4) is None
    assert stamp_json(b"", R3, R4) is None


def test_an_answer_over_a_change_of_runs_names_both() -> None:
    stamped = stamp_json(b"{}", R3, VersionRef("f", 1))
    assert stamped is not None
    assert json.loads(stamped) == {
        "weight_version_start": 3,
        "weight_version_end": 1,
        "weight_run": "r",
        "weight_run_end": "f",
    }
    own = stamp_run(b'{"weight_version_start":3,"weight_version_end":1}', R3, VersionRef("f", 1))
    assert own is not None
    assert json.loads(own) == json.loads(stamped)


def test_a_change_of_runs_is_told_once_even_if_the_engine_stamped_the_stream() -> None:
    own = b'data: {"object":"stitch.versions","weight_version_start":3,"weight_version_end":1}\n\n'
    end = VersionRef("f", 1)
    stamper = StreamStamper()
    stream = FRAMES["plain"] + own + ENDS[0]
    got = stamper.feed(stream, R3, end) + stamper.finish(R3, end)
    assert got == FRAMES["plain"] + own + stamp_event(R3, end) + ENDS[0]


def test_an_engines_own_stamps_are_recognised_but_not_the_words_in_a_text() -> None:
    assert is_stamped(b'{"weight_version_start": 1, "weight_version_end": 12}')
    assert stamped_end(b'{"weight_version_start": 1, "weight_version_end": 12}') == 12
    assert not is_stamped(b'{"text":"\\"weight_version_start\\": 1"}')
    assert not is_stamped(b'{"text":"weight_version_start"}')
