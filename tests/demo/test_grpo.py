"""Advantages, the objective, and an optimiser step on the tiny model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stitch.demo.grpo import Batch, Learner, advantages, collate, objective, output_logprobs
from stitch.demo.rollouts import Sample


def sample(
    prompt: tuple[int, ...], output: tuple[int, ...], reward: float = 0.0, group: int = 0
) -> Sample:
    return Sample(
        group=group,
        prompt_ids=prompt,
        output_ids=output,
        logprobs=(-1.0,) * len(output),
        text="",
        reward=reward,
        correct=False,
        versions=(0,),
    )


SAMPLES = [
    sample((5, 6, 7), (8, 9), 1.0, 0),
    sample((5, 6, 7), (10, 11, 12, 13), 0.2, 0),
    sample((30, 31, 32, 33, 34), (14,), 0.5, 1),
    sample((30, 31, 32, 33, 34), (15, 16, 17), 0.1, 1),
]


def test_advantages_are_normalised_within_each_group() -> None:
    found = advantages([1.0, 3.0, 10.0, 30.0], [0, 0, 1, 1])
    assert found == pytest.approx([-1.0, 1.0, -1.0, 1.0], abs=1e-5)


def test_a_group_whose_rewards_agree_has_no_advantage() -> None:
    assert advantages([0.5, 0.5, 1.0, 0.0], [0, 0, 1, 1])[:2] == [0.0, 0.0]


def test_log_probabilities_do_not_depend_on_padding_or_neighbours(tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    together = output_logprobs(model, collate(SAMPLES, [0.0] * 4, pad=0))
    for row, one in enumerate(SAMPLES):
        alone = output_logprobs(model, collate([one], [0.0], pad=0))[0]
        torch.testing.assert_close(together[row, : len(one.output_ids)], alone, atol=0.05, rtol=0)


def test_log_probabilities_are_those_of_the_model(tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    one = SAMPLES[1]
    ids = torch.tensor([one.prompt_ids + one.output_ids])
    scores = model(input_ids=ids).logits.log_softmax(-1)[0]
    expected = [scores[len(one.prompt_ids) - 1 + k, t] for k, t in enumerate(one.output_ids)]
    found = output_logprobs(model, collate([one], [0.0], pad=0))[0]
    torch.testing.assert_close(found, torch.stack(expected), atol=0.05, rtol=0)


def batch(behaviour: float, advantage: float) -> Batch:
    return Batch(
        input_ids=torch.zeros(1, 3, dtype=torch.int64),
        attention_mask=torch.ones(1, 3, dtype=torch.int64),
        behaviour=torch.full((1, 2), behaviour),
        mask=torch.tensor([[1.0, 0.0]]),
        advantage=torch.tensor([[advantage]]),
    )


def test_on_policy_the_loss_is_minus_the_advantage_of_unmasked_tokens() -> None:
    loss, clipped = objective(torch.full((1, 2), -1.0), batch(-1.0, 2.0))
    assert (loss.item(), clipped.item()) == (-2.0, 0.0)


@pytest.mark.parametrize(("shift", "advantage"), [(1.0, 1.0), (-1.0, -1.0)])
def test_a_ratio_that_went_too_far_gives_no_gradient(shift: float, advantage: float) -> None:
    logprobs = torch.full((1, 2), -1.0 + shift, requires_grad=True)
    loss, clipped = objective(logprobs, batch(-1.0, advantage))
    loss.backward()
    assert clipped.item() == 1.0
    assert logprobs.grad is not None
    assert logprobs.grad.abs().max() == 0


def test_a_step_makes_good_answers_likelier(tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    before = output_logprobs(model, collate(SAMPLES, [0.0] * 4, pad=0)).detach()
    exact = [
        Sample(**{**vars(s), "logprobs": tuple(before[row, : len(s.output_ids)].tolist())})
        for row, s in enumerate(SAMPLES)
    ]
    learner = Learner(model, pad=0)
    for _ in range(20):
        stats = learner.step(exact)
    after = output_logprobs(model, collate(SAMPLES, [0.0] * 4, pad=0)).detach()
    gain = (after - before).sum(1)
    assert stats.num_tokens == 10
    assert gain[0] > gain[1]
    assert gain[2] > gain[3]


def test_a_step_moves_every_matrix_and_leaves_out_empty_answers(tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stats = Learner(model, pad=0).step([*SAMPLES, sample((5, 6), (), -1.0, 2)])
    assert stats.num_tokens == 10
    assert stats.grad_norm > 0
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
