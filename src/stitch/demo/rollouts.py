"""Samples for a training step, asked of the replicas through the client, one step ahead."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from stitch.client import Answer
from stitch.client.client import COMPLETIONS
from stitch.demo.task import STOP, Problem, is_correct, reward
from stitch.errors import RequestFailedError


class Asks(Protocol):
    """The part of :class:`stitch.Client` that is used."""

    def submit(self, path: str, body: dict[str, Any], **options: Any) -> Future[Answer]: ...


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that is used."""

    def encode(self, text: str, **options: Any) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sampled answer: tokens, the log-probabilities it was drawn with, and its reward."""

    group: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    reward: float
    correct: bool
    versions: tuple[int, ...]
    """Weight versions that its tokens came from, ascending."""


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The samples of one step. `retried`: attempts beyond the first, over all requests."""

    samples: list[Sample]
    num_requests: int
    retried: int
    spanning: int
    """Requests whose tokens came from more than one version."""

    @property
    def versions(self) -> list[int]:
        return sorted({version for sample in self.samples for version in sample.versions})

    @property
    def mean_reward(self) -> float:
        return sum(s.reward for s in self.samples) / max(1, len(self.samples))

    @property
    def accuracy(self) -> float:
        return sum(s.correct for s in self.samples) / max(1, len(self.samples))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request under way: a group of samples for one problem."""

    group: int
    problem: Problem
    prompt_ids: tuple[int, ...]
    future: Future[Answer]


def ask(
    client: Asks,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    *,
    group_size: int,
    max_tokens: int,
    min_version: int,
    deadline_s: float,
    seed: int,
) -> list[Asked]:
    """Send one request of `group_size` samples per problem; returns at once."""
    asked = []
    for group, problem in enumerate(problems):
        prompt_ids = tuple(tokenizer.encode(problem.prompt, add_special_tokens=False))
        body = {
            "prompt": list(prompt_ids),
            "n": group_size,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "stop": [STOP],
            "seed": seed * 1000 + group,
            "logprobs": 0,
            "return_token_ids": True,
        }
        future = client.submit(COMPLETIONS, body, min_version=min_version, deadline_s=deadline_s)
        asked.append(Asked(group=group, problem=problem, prompt_ids=prompt_ids, future=future))
    return asked


def collect(asked: Sequence[Asked]) -> Rollouts:
    """Wait for all answers. Raises the client's error if a request failed for good."""
    samples: list[Sample] = []
    retried = spanning = 0
    for one in asked:
        answer = one.future.result()
        found = [_sample(one, answer, at) for at in range(len(answer.choices))]
        samples += found
        retried += answer.attempts - 1
        spanning += len({version for sample in found for version in sample.versions}) > 1
    return Rollouts(samples=samples, num_requests=len(asked), retried=retried, spanning=spanning)


def _sample(one: Asked, answer: Answer, at: int) -> Sample:
    choice = answer.choices[at]
    output_ids = tuple(choice.get("token_ids") or ())
    logprobs = tuple((choice.get("logprobs") or {}).get("token_logprobs") or ())
    if len(output_ids) != len(logprobs):
        raise RequestFailedError(
            f"replica {answer.replica} sent {len(output_ids)} token ids and {len(logprobs)} "
            "log-probabilities for one answer"
        )
    text = choice["text"]
    return Sample(
        group=one.group,
        prompt_ids=one.prompt_ids,
        output_ids=output_ids,
        logprobs=logprobs,
        text=text,
        reward=reward(one.problem, text, len(output_ids)),
        correct=is_correct(one.problem, text),
        versions=tuple(sorted({span.version for span in answer.spans(at)})),
    )
