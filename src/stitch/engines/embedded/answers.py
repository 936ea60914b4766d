"""Turning a choice's events into OpenAI's JSON, whole or chunk by chunk."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stitch.engines import stamps
from stitch.engines.embedded.generation import FinishReason, TokenOut
from stitch.engines.embedded.sampling import SampledToken
from stitch.engines.embedded.vocabulary import Vocabulary


@dataclass(eq=False, kw_only=True)
class Choice:
    """What came out of one choice so far."""

    index: int
    prompt: Sequence[int]
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    finish: FinishReason | None = None
    num_sent: int = 0
    """Tokens that a stream has sent."""
    chars_sent: int = 0

    def take(self, event: TokenOut) -> None:
        self.tokens.append(event.token)
        self.versions.append(event.version)
        self.text += event.text
        self.finish = event.finish


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Builds the JSON of one request's answer."""

    chat: bool
    model: str
    vocabulary: Vocabulary
    wants_logprobs: bool
    wants_token_ids: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice], num_prompt_tokens: int) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        kind = "chat.completion" if self.chat else "text_completion"
        answer = {
            **self._head(kind),
            "choices": [self._whole_choice(choice) for choice in choices],
            "usage": usage(choices, num_prompt_tokens),
            **stamps.stamp_json([choice.versions for choice in choices]),
        }
        if self.chat and self.wants_token_ids:
            answer["prompt_token_ids"] = list(choices[0].prompt)
        return answer

    def chunk(self, choice: Choice, *, first: bool) -> dict[str, Any]:
        """What a stream sends of a choice now: everything that was not sent before."""
        tokens = choice.tokens[choice.num_sent :]
        text = choice.text[choice.chars_sent :]
        row: dict[str, Any] = {"index": choice.index}
        if self.chat:
            row["delta"] = ({"role": "assistant"} if first else {}) | {"content": text}
        else:
            row["text"] = text
        row["logprobs"] = self._logprobs(tokens, choice.chars_sent)
        row["finish_reason"] = choice.finish
        if self.wants_token_ids:
            row["token_ids"] = [token.token_id for token in tokens]
            if first:
                row["prompt_token_ids"] = list(choice.prompt)
        choice.num_sent = len(choice.tokens)
        choice.chars_sent = len(choice.text)
        return {**self._stream_head(), "choices": [row]}

    def usage_chunk(self, choices: Sequence[Choice], num_prompt_tokens: int) -> dict[str, Any]:
        return {**self._stream_head(), "choices": [], "usage": usage(choices, num_prompt_tokens)}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        row: dict[str, Any] = {"index": choice.index}
        if self.chat:
            row["message"] = {"role": "assistant", "content": choice.text}
        else:
            row["text"] = choice.text
        row["logprobs"] = self._logprobs(choice.tokens, 0)
        row["finish_reason"] = choice.finish
        row["weight_versions"] = stamps.spans_json(choice.versions)
        if self.wants_token_ids:
            row["token_ids"] = [token.token_id for token in choice.tokens]
            if not self.chat:
                row["prompt_token_ids"] = list(choice.prompt)
        return row

    def _logprobs(self, tokens: Sequence[SampledToken], offset: int) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        if self.chat:
            return {"content": [self._chat_logprob(token) for token in tokens]}
        return self._completion_logprobs(tokens, offset)

    def _chat_logprob(self, token: SampledToken) -> dict[str, Any]:
        return {
            **self._named(token.token_id, token.logprob),
            "top_logprobs": [self._named(token_id, value) for token_id, value in token.top],
        }

    def _named(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = self.vocabulary.raw(token_id)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(raw),
        }

    def _completion_logprobs(self, tokens: Sequence[SampledToken], offset: int) -> dict[str, Any]:
        texts = [self.vocabulary.text(token.token_id) for token in tokens]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(self.vocabulary.raw(token.token_id).decode("utf-8", "replace"))
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self.vocabulary.text(token_id): value for token_id, value in token.top}
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _stream_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def usage(choices: Sequence[Choice], num_prompt_tokens: int) -> dict[str, int]:
    """Tokens in and out; a prompt counts once however many choices it has."""
    num_out = sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_out,
        "total_tokens": num_prompt_tokens + num_out,
    }
