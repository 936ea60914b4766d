"""Samples asked through a client."""

from __future__ import annotations

from typing import Any

import pytest
from demo_fakes import SamplingClient

from stitch.demo.rollouts import ask, collect
from stitch.demo.task import problems
from stitch.errors import RequestFailedError


def asked(client: SamplingClient, tokenizer: Any) -> Any:
    return ask(
        client,
        tokenizer,
        problems(1, 2),
        group_size=3,
        max_tokens=4,
        min_version=2,
        deadline_s=9.0,
        seed=1,
    )


def test_each_problem_brings_a_group_of_samples_with_their_log_probabilities(
    tiny: tuple[Any, Any], sampling_client: SamplingClient
) -> None:
    rollouts = collect(asked(sampling_client, tiny[1]))
    assert [s.group for s in rollouts.samples] == [0, 0, 0, 1, 1, 1]
    for sample in rollouts.samples:
        assert len(sample.output_ids) == len(sample.logprobs) == 4
        assert sample.versions == (2, 3)
    assert (rollouts.num_requests, rollouts.retried, rollouts.spanning) == (2, 2, 2)
    assert rollouts.versions == [2, 3]
    assert sampling_client.options[0] == {"min_version": 2, "deadline_s": 9.0}


def test_an_answer_without_log_probabilities_is_refused(
    tiny: tuple[Any, Any], sampling_client: SamplingClient
) -> None:
    sampling_client.spoil = lambda choice: choice.pop("logprobs")
    with pytest.raises(RequestFailedError, match="4 token ids and 0 log-probabilities"):
        collect(asked(sampling_client, tiny[1]))
