"""One choice being generated, and the events it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from stitch.engines.embedded.sampling import SampledToken, Sampler, SamplingParams
from stitch.engines.embedded.text import TextStream

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenOut:
    """One output token. `text` is what it released: perhaps nothing, perhaps held-back text too.

    `version` labels the weights that computed the token's logits; None before the first bind.
    """

    token: SampledToken
    version: int | None
    text: str
    finish: FinishReason | None


@dataclass(frozen=True)
class Failed:
    """The choice ended because of an error; nothing follows."""

    message: str


Event = TokenOut | Failed
Sink = Callable[[Event], None]


@dataclass(eq=False, kw_only=True)
class Generation:
    """A prompt, how to go on from it, and where its tokens go. Owned by the decode thread."""

    prompt: Sequence[int]
    params: SamplingParams
    sampler: Sampler
    text: TextStream
    eos_ids: frozenset[int]
    sink: Sink
    output: list[int] = field(default_factory=list)
    slot: int = -1
    aborted: bool = False
    """Set by any thread; the decode thread drops the sequence before its next step."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that may not come yet: the enders, until min_tokens are out."""
        if len(self.output) >= self.params.min_tokens:
            return ()
        return tuple(self.enders)

    @property
    def enders(self) -> frozenset[int]:
        """Tokens that end the choice."""
        eos = frozenset[int]() if self.params.ignore_eos else self.eos_ids
        return eos | self.params.stop_token_ids

    def accept(self, token: SampledToken, version: int | None) -> TokenOut:
        """Append a token and say what is released and whether the choice is finished."""
        self.output.append(token.token_id)
        enough = len(self.output) >= self.params.min_tokens
        text = self.text.push(token.token_id, may_stop=enough)
        finish: FinishReason | None = None
        if self.text.stopped_by is not None or token.token_id in self.enders:
            finish = "stop"
        elif len(self.output) >= self.params.max_tokens:
            finish = "length"
        if finish is not None:
            text += self.text.finish()
            if self.text.stopped_by is not None:
                finish = "stop"
        return TokenOut(token, version, text, finish)
