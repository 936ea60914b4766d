"""Group-relative policy optimisation: advantages, the clipped objective, one optimiser step.

Shao et al. 2024, "DeepSeekMath", section 4.1, with the loss averaged over tokens. The importance
ratio is taken against the log-probabilities that the serving replicas reported, so it also
corrects for samples that are one version old and for serving in BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from stitch.demo.rollouts import Sample

LEARNING_RATE, BETAS, WEIGHT_DECAY = 1e-6, (0.9, 0.95), 0.1
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MAX_GRAD_NORM = 1.0
MICROBATCH = 8


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One optimiser step. `clip_share`: share of tokens whose ratio was outside the clip range."""

    loss: float
    grad_norm: float
    clip_share: float
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Prompts padded on the left, outputs on the right, so that all outputs begin in one column.

    input_ids, attention_mask: int64 (B, P+T); behaviour, mask: float32 (B, T); advantage: (B, 1).
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    behaviour: torch.Tensor
    mask: torch.Tensor
    advantage: torch.Tensor


def advantages(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """(reward - mean) / deviation within each group; zeros where all rewards of a group agree."""
    members: dict[int, list[float]] = {}
    for value, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(value)
    moments = {}
    for group, values in members.items():
        mean = sum(values) / len(values)
        moments[group] = mean, (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
    return [
        (value - moments[group][0]) / (moments[group][1] + 1e-6)
        for value, group in zip(rewards, groups, strict=True)
    ]


def collate(samples: Sequence[Sample], scores: Sequence[float], pad: int) -> Batch:
    """Lay samples out as one :class:`Batch`."""
    prompt = max(len(s.prompt_ids) for s in samples)
    output = max(len(s.output_ids) for s in samples)
    input_ids = torch.full((len(samples), prompt + output), pad)
    attention_mask = torch.zeros_like(input_ids)
    behaviour = torch.zeros(len(samples), output)
    mask = torch.zeros(len(samples), output)
    for row, sample in enumerate(samples):
        start, count = prompt - len(sample.prompt_ids), len(sample.output_ids)
        input_ids[row, start:prompt] = torch.tensor(sample.prompt_ids)
        input_ids[row, prompt : prompt + count] = torch.tensor(sample.output_ids)
        attention_mask[row, start : prompt + count] = 1
        behaviour[row, :count] = torch.tensor(sample.logprobs)
        mask[row, :count] = 1
    advantage = torch.tensor(scores, dtype=torch.float32).unsqueeze(1)
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        behaviour=behaviour,
        mask=mask,
        advantage=advantage,
    )


def has_bf16() -> bool:
    """Whether this CPU multiplies BF16 matrices without emulation."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def output_logprobs(model: Any, batch: Batch) -> torch.Tensor:
    """Log-probabilities (B, T) of the output tokens under `model`.

    The matrix products run in BF16 where the CPU has instructions for it, else in FP32: emulated
    ones were 6 times slower forward and 40 times slower backward.
    """
    num_outputs = batch.mask.shape[1]
    positions = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bf16()):
        logits = model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=num_outputs + 1,
        ).logits[:, :-1]
    chosen = batch.input_ids[:, -num_outputs:].unsqueeze(-1)
    return logits.float().log_softmax(-1).gather(-1, chosen).squeeze(-1)


def objective(logprobs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over output tokens: the loss, and how many ratios were outside the clip range."""
    ratio = (logprobs - batch.behaviour).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain = torch.minimum(ratio * batch.advantage, clipped * batch.advantage)
    outside = (ratio != clipped).float()
    return -(gain * batch.mask).sum(), (outside * batch.mask).sum().detach()


class Learner:
    """FP32 weights and their optimiser."""

    def __init__(self, model: Any, pad: int) -> None:
        self.model = model.eval()  # dropout would tilt the importance ratio
        self._pad = pad
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=LEARNING_RATE,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )

    def step(self, samples: Sequence[Sample]) -> StepStats:
        """One update from all samples, in microbatches. Samples without output are left out."""
        scores = advantages([s.reward for s in samples], [s.group for s in samples])
        pairs = [(s, a) for s, a in zip(samples, scores, strict=True) if s.output_ids]
        pairs.sort(key=lambda pair: len(pair[0].output_ids))  # less padding in each microbatch
        num_tokens = sum(len(s.output_ids) for s, _ in pairs)
        loss, outside = 0.0, 0.0
        for at in range(0, len(pairs), MICROBATCH):
            chunk = pairs[at : at + MICROBATCH]
            batch = collate([s for s, _ in chunk], [a for _, a in chunk], self._pad)
            part, clips = objective(output_logprobs(self.model, batch), batch)
            (part / num_tokens).backward()
            loss, outside = loss + part.item(), outside + clips.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        return StepStats(
            loss=loss / max(1, num_tokens),
            grad_norm=float(norm),
            clip_share=outside / max(1, num_tokens),
            num_tokens=num_tokens,
        )
