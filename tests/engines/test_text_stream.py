"""Text as it is released while tokens come: whole characters, stop strings held back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.engines.embedded.text import TextStream


def decode_bytes(ids: Sequence[int]) -> str:
    """A byte-level tokenizer: one token a byte."""
    return bytes(ids).decode("utf-8", "replace")


def pieces(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(decode_bytes, stop)
    out = []
    for byte in text.encode():
        out.append(stream.push(byte))
        if stream.stopped_by is not None:
            break
    out.append(stream.finish())
    return out, stream


@given(st.text())
def test_the_pieces_make_up_the_text(text: str) -> None:
    assert "".join(pieces(text)[0]) == text


def test_a_character_of_several_tokens_comes_whole() -> None:
    assert pieces("a€b")[0] == ["a", "", "", "€", "b", ""]


def test_bytes_that_are_no_text_come_out_as_replacements_at_the_end() -> None:
    stream = TextStream(decode_bytes)
    assert [stream.push(byte) for byte in (0xFF, 0xFE)] == ["", ""]
    assert stream.finish() == "\ufffd\ufffd"


@given(st.binary(max_size=40))
def test_any_bytes_make_up_the_text_that_they_decode_to(data: bytes) -> None:
    stream = TextStream(decode_bytes)
    out = [stream.push(byte) for byte in data]
    assert "".join(out) + stream.finish() == data.decode("utf-8", "replace")


def test_bytes_that_are_no_text_are_not_held_for_ever() -> None:
    stream = TextStream(decode_bytes)
    assert "".join(stream.push(0xFF) for _ in range(10)) == "\ufffd" * 7


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    out, stream = pieces(text, tuple(stops))
    whole = "".join(out)
    # The first stop to be complete wins, as tokens come one by one.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (whole, stream.stopped_by) == (text, None)
        return
    seen = text[: min(ends)]
    assert stream.stopped_by in stops
    assert whole == seen[: min(seen.find(stop) for stop in stops if stop in seen)]


@given(st.text(alphabet="ab", max_size=20), st.text(alphabet="ab", min_size=1, max_size=4))
def test_nothing_of_a_stop_string_is_ever_released_early(text: str, stop: str) -> None:
    stream = TextStream(decode_bytes, (stop,))
    released = ""
    for byte in text.encode():
        released += stream.push(byte)
        assert stop not in released
        if stream.stopped_by:
            return


def test_text_that_begins_a_stop_string_is_held_until_it_cannot_be_one() -> None:
    assert pieces("ab-STOX", ("STOP",))[0] == ["a", "b", "-", "", "", "", "STOX", ""]


def test_stop_strings_do_not_count_before_they_may() -> None:
    stream = TextStream(decode_bytes, ("b",))
    out = [stream.push(byte, may_stop=False) for byte in b"ab"] + [stream.push(ord("b"))]
    assert ("".join(out), stream.stopped_by) == ("ab", "b")


@pytest.mark.parametrize("stop", ["é", "€"])
def test_a_stop_string_may_be_a_character_of_several_tokens(stop: str) -> None:
    out, stream = pieces(f"x{stop}y", (stop,))
    assert ("".join(out), stream.stopped_by) == ("x", stop)
