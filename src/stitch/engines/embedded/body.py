"""Reading request bodies: what the OpenAI-like routes accept, strictly typed.

Unknown fields are ignored; a known field of the wrong type or range is a BadRequestError that
names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stitch.engines.embedded.sampling import SamplingParams
from stitch.errors import UsageError

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
_DEFAULT_COMPLETION_TOKENS = 16

Body = Mapping[str, Any]


class BadRequestError(UsageError):
    """The request is wrong; `param` names the field, as OpenAI's error shape has it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A parsed request, still without its tokens. `max_tokens` None: as many as fit."""

    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    min_tokens: int
    num_logprobs: int | None

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            num_logprobs=self.num_logprobs,
        )


def parse_ask(body: Body, *, chat: bool) -> Ask:
    """Everything but the prompt. Raises BadRequestError."""
    if _flag(body, "echo"):
        raise BadRequestError("echo is not supported", "echo")
    best_of = _integer(body, "best_of", 1, MAX_CHOICES)
    n = _integer(body, "n", 1, MAX_CHOICES) or 1
    if best_of is not None and best_of != n:
        raise BadRequestError("best_of is not supported unless it equals n", "best_of")
    for name in ("user", "cache_salt"):
        _text(body, name)
    return Ask(
        max_tokens=_max_tokens(body, chat=chat),
        n=n,
        stream=_flag(body, "stream"),
        include_usage=_include_usage(body),
        return_token_ids=_flag(body, "return_token_ids"),
        temperature=_number(body, "temperature", 0.0, 100.0, 1.0),
        top_p=_top_p(body),
        top_k=max(0, _integer(body, "top_k", -1, 2**31) or 0),
        seed=_integer(body, "seed", -(2**63), 2**63 - 1),
        stop=_stops(body),
        stop_token_ids=_token_set(body, "stop_token_ids"),
        ignore_eos=_flag(body, "ignore_eos"),
        min_tokens=_integer(body, "min_tokens", 0, 2**31) or 0,
        num_logprobs=_chat_logprobs(body) if chat else _completion_logprobs(body),
    )


def parse_prompts(body: Body) -> list[str] | list[list[int]]:
    """`prompt`: a string, a list of strings, a list of token ids or a list of such lists."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return list(prompt)
        if all(_is_int(item) for item in prompt):
            return [list(prompt)]
        if all(isinstance(item, list) and all(map(_is_int, item)) for item in prompt):
            return [list(item) for item in prompt]
    if prompt == []:
        raise BadRequestError("prompt is empty", "prompt")
    raise BadRequestError(
        f"prompt must be a string, strings, token ids or lists of token ids, got {prompt!r:.100}",
        "prompt",
    )


def parse_messages(body: Body) -> list[dict[str, str]]:
    """`messages` with texts as contents; content parts of type "text" are joined."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a non-empty list", "messages")
    return [_message(item, f"messages[{at}]") for at, item in enumerate(messages)]


def _message(item: object, where: str) -> dict[str, str]:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise BadRequestError(f"{where} must be an object with a role", where)
    content = item.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        kinds = {part.get("type") if isinstance(part, dict) else None for part in content}
        if kinds - {"text"} or not all(isinstance(text, str) for text in texts):
            raise BadRequestError(f"{where}.content: only parts of type text are supported", where)
        content = "".join(map(str, texts))
    if not isinstance(content, str):
        raise BadRequestError(f"{where}.content must be a text, got {content!r:.100}", where)
    return {"role": item["role"], "content": content}


def _max_tokens(body: Body, *, chat: bool) -> int | None:
    value = _integer(body, "max_completion_tokens", 1, 2**31) if chat else None
    if value is None:
        value = _integer(body, "max_tokens", 1, 2**31)
    if value is None and not chat:
        return _DEFAULT_COMPLETION_TOKENS
    return value


def _include_usage(body: Body) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise BadRequestError("stream_options must be an object", "stream_options")
    return _flag(options, "include_usage")


def _top_p(body: Body) -> float:
    top_p = _number(body, "top_p", 0.0, 1.0, 1.0)
    if top_p == 0.0:
        raise BadRequestError("top_p must be above 0", "top_p")
    return top_p


def _stops(body: Body) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadRequestError("stop must be a non-empty text or a list of such", "stop")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise BadRequestError(
            f"stop takes at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters", "stop"
        )
    return tuple(stops)


def _token_set(body: Body, name: str) -> frozenset[int]:
    value = body.get(name)
    if value is None:
        return frozenset()
    if not isinstance(value, list) or len(value) > 256 or not all(map(_is_int, value)):
        raise BadRequestError(f"{name} must be a list of at most 256 token ids", name)
    return frozenset(value)


def _completion_logprobs(body: Body) -> int | None:
    return _integer(body, "logprobs", 0, MAX_LOGPROBS)


def _chat_logprobs(body: Body) -> int | None:
    top = _integer(body, "top_logprobs", 0, MAX_LOGPROBS)
    if not _flag(body, "logprobs"):
        if top:
            raise BadRequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return None
    return top or 0


def _flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequestError(f"{name} must be true or false, got {value!r:.100}", name)
    return bool(value)


def _text(body: Body, name: str) -> None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequestError(f"{name} must be a text, got {value!r:.100}", name)


def _integer(body: Body, name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not _is_int(value) or not low <= value <= high:
        raise BadRequestError(
            f"{name} must be an integer in {low}..{high}, got {value!r:.100}", name
        )
    return int(value)


def _number(body: Body, name: str, low: float, high: float, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or not low <= value <= high:
        raise BadRequestError(f"{name} must be a number in {low}..{high}, got {value!r:.100}", name)
    return float(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
