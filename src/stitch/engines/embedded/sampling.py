"""Choosing tokens: per-request parameters, per-request random numbers, raw log-probabilities."""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import dataclass

import torch

from stitch.errors import EngineError

_NUCLEUS_GUESS = 1024
"""top_p looks at so many tokens before it sorts the whole vocabulary."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request wants its tokens.

    `num_logprobs`: None for none, k for the chosen token's and those of the k most likely. They
    are of the model's own distribution: log-softmax of the raw logits in float32, before
    temperature, top_k and top_p.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    num_logprobs: int | None = None


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choice_seed(seed: int | None, choice: int) -> int:
    """Seed of choice `choice`: the request's own for the first, derived for others, fresh if None.

    So `n=4` begins with the same choice as `n=1`.
    """
    if seed is None:
        return secrets.randbits(63)
    if choice == 0:
        return seed
    mixed = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "little") >> 1


class Sampler:
    """Draws the tokens of one choice. Uses exactly one random number per sampled token."""

    def __init__(self, params: SamplingParams, seed: int, device: torch.device) -> None:
        self._params = params
        self._generator: torch.Generator | None = None
        if params.temperature > 0:
            self._generator = torch.Generator(device=device)
            self._generator.manual_seed(seed)

    def pick(self, logits: torch.Tensor, banned: tuple[int, ...] = ()) -> SampledToken:
        """Choose from one row of raw logits [vocab]; `banned` ids cannot come out.

        Raises EngineError when the logits are not finite.
        """
        raw = logits.float()
        if not math.isfinite(raw.max().item()) or bool(raw.isnan().any()):
            raise EngineError("the model's logits are not finite: its weights may be damaged")
        allowed = raw
        if banned:
            allowed = raw.clone()
            allowed[list(banned)] = -math.inf
        if self._generator is None:
            token = int(allowed.argmax())
        else:
            token = self._draw(allowed)
        return self._with_logprobs(raw, token)

    def _with_logprobs(self, raw: torch.Tensor, token: int) -> SampledToken:
        count = self._params.num_logprobs
        if count is None:
            return SampledToken(token)
        logprobs = raw.log_softmax(-1)
        top: tuple[tuple[int, float], ...] = ()
        if count:
            values, ids = logprobs.topk(min(count, logprobs.shape[-1]))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return SampledToken(token, float(logprobs[token]), top)

    def _draw(self, logits: torch.Tensor) -> int:
        probs = (logits / self._params.temperature).softmax(-1)
        ids: torch.Tensor | None = None
        if 0 < self._params.top_k < probs.shape[-1]:
            probs, ids = probs.topk(self._params.top_k)
        if self._params.top_p < 1.0:
            probs, kept = _nucleus(probs, self._params.top_p)
            ids = kept if ids is None else ids[kept]
        total = probs.double().cumsum(-1)
        spot = torch.rand((), generator=self._generator, dtype=torch.float64, device=probs.device)
        at = int(torch.searchsorted(total, spot * total[-1], right=True))
        if at >= total.shape[-1]:  # rounding put the spot on the very end
            at = int(probs.argmax())
        return at if ids is None else int(ids[at])


def _nucleus(probs: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest most likely tokens whose probabilities (of those given) reach `top_p`."""
    wanted = top_p * float(probs.sum())
    values, ids = probs.topk(min(_NUCLEUS_GUESS, probs.shape[-1]))
    if float(values.sum()) < wanted:
        values, ids = probs.sort(descending=True)
    before = values.double().cumsum(-1) - values
    count = max(1, int((before < wanted).sum()))
    return values[:count], ids[:count]
