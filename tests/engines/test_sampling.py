"""Choosing tokens from logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stitch.engines.embedded.sampling import Sampler, SamplingParams, choice_seed
from stitch.errors import EngineError

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.0, 1.0, 3.0, 2.0, -1.0])


def sampler(seed: int = 1, **params: Any) -> Sampler:
    return Sampler(SamplingParams(max_tokens=1, **params), seed, CPU)


def drawn(count: int, **params: Any) -> list[int]:
    it = sampler(**params)
    return [it.pick(LOGITS).token_id for _ in range(count)]


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert set(drawn(20, temperature=0.0)) == {2}


def test_a_seed_fixes_the_draws() -> None:
    assert drawn(50, seed=7) == drawn(50, seed=7)
    assert drawn(50, seed=7) != drawn(50, seed=8)


def test_draws_follow_the_distribution() -> None:
    draws = drawn(4000)
    wanted = LOGITS.softmax(-1)
    for token in range(5):
        assert draws.count(token) / 4000 == pytest.approx(float(wanted[token]), abs=0.03)


def test_low_temperature_sharpens() -> None:
    assert drawn(200, temperature=0.05).count(2) == 200


def test_top_k_keeps_only_the_k_likeliest() -> None:
    assert set(drawn(300, top_k=2)) == {2, 3}


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    # Probabilities: token 2 0.63, token 3 0.23, token 1 0.09.
    assert set(drawn(300, top_p=0.6)) == {2}
    assert set(drawn(300, top_p=0.7)) == {2, 3}


def test_top_p_of_a_flat_distribution_looks_beyond_the_likeliest_thousand() -> None:
    it = sampler(top_p=0.9)
    flat = torch.zeros(4096)
    kept = {it.pick(flat).token_id for _ in range(3000)}
    assert len(kept) > 1500


def test_logprobs_are_of_the_raw_distribution_whatever_the_temperature() -> None:
    it = sampler(temperature=0.01, top_k=1, num_logprobs=3)
    token = it.pick(LOGITS)
    wanted = LOGITS.log_softmax(-1)
    assert token.logprob == pytest.approx(float(wanted[2]))
    assert [token_id for token_id, _ in token.top] == [2, 3, 1]
    assert [value for _, value in token.top] == pytest.approx(wanted[[2, 3, 1]].tolist())


def test_banned_tokens_never_come_out_but_keep_their_share_of_the_logprobs() -> None:
    it = sampler(num_logprobs=0)
    tokens = [it.pick(LOGITS, banned=(2, 3)) for _ in range(200)]
    assert not {2, 3} & {token.token_id for token in tokens}
    by_id = {token.token_id: token.logprob for token in tokens}
    assert by_id[1] == pytest.approx(float(LOGITS.log_softmax(-1)[1]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    logits = LOGITS.clone()
    logits[4] = bad
    with pytest.raises(EngineError, match="finite"):
        sampler().pick(logits)


def test_every_choice_has_its_own_seed_and_the_first_has_the_requests() -> None:
    seeds = [choice_seed(5, which) for which in range(8)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 8
    assert seeds == [choice_seed(5, which) for which in range(8)]
    assert choice_seed(None, 0) != choice_seed(None, 0)
