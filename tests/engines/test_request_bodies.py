"""Bodies of requests: what is taken, what is ignored, what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from stitch.engines.embedded.body import (
    BadRequestError,
    parse_ask,
    parse_messages,
    parse_prompts,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "7"),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 2.5),
        ("seed", "a"),
        ("seed", 2**64),
        ("stop", 3),
        ("stop", ""),
        ("stop", ["a", 1]),
        ("stop", ["x"] * 17),
        ("n", 0),
        ("n", 129),
        ("logprobs", True),
        ("logprobs", 21),
        ("ignore_eos", 1),
        ("stream", "yes"),
        ("stream_options", []),
        ("return_token_ids", "yes"),
        ("min_tokens", -1),
        ("stop_token_ids", [1.5]),
        ("user", 5),
        ("cache_salt", 5),
        ("echo", True),
        ("best_of", 4),
    ],
)
def test_a_field_of_the_wrong_type_or_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(BadRequestError, match=field) as caught:
        parse_ask({"prompt": "a", field: value}, chat=False)
    assert caught.value.param == field


def test_unknown_fields_are_ignored() -> None:
    assert parse_ask({"prompt": "a", "presence_penalty": "?", "frobnicate": 1}, chat=False).n == 1


def test_defaults_are_those_of_the_openai_api() -> None:
    ask = parse_ask({}, chat=False)
    assert (ask.max_tokens, ask.temperature, ask.top_p, ask.n) == (16, 1.0, 1.0, 1)
    assert ask.num_logprobs is None
    assert parse_ask({}, chat=True).max_tokens is None


def test_null_is_as_good_as_absent() -> None:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "logprobs")
    assert parse_ask(dict.fromkeys(names), chat=False) == parse_ask({}, chat=False)


def test_chat_takes_max_completion_tokens_before_max_tokens() -> None:
    assert parse_ask({"max_completion_tokens": 3, "max_tokens": 9}, chat=True).max_tokens == 3


def test_chat_logprobs_are_a_switch_and_a_number() -> None:
    assert parse_ask({"logprobs": True}, chat=True).num_logprobs == 0
    assert parse_ask({"logprobs": True, "top_logprobs": 5}, chat=True).num_logprobs == 5
    with pytest.raises(BadRequestError, match="top_logprobs"):
        parse_ask({"top_logprobs": 5}, chat=True)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_come_in_four_forms(prompt: Any, wanted: Any) -> None:
    assert parse_prompts({"prompt": prompt}) == wanted


@pytest.mark.parametrize("prompt", [None, 5, [], ["a", 1], [True], [[1], "a"], {"a": 1}])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(BadRequestError, match="prompt"):
        parse_prompts({"prompt": prompt})


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = parse_messages({"messages": [{"role": "user", "content": parts}]})
    assert messages == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        ["hi"],
        [{"content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    ],
)
def test_other_messages_are_refused(messages: Any) -> None:
    with pytest.raises(BadRequestError, match="messages"):
        parse_messages({"messages": messages})
