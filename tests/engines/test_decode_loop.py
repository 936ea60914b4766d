"""The decode loop: same answers alone or together, exact labels, faults kept to one request."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_kit import HandLoop, Wanted

from stitch.engines.embedded import loop as loop_module
from stitch.engines.embedded.generation import Failed
from stitch.engines.embedded.loop import DecodeLoop, QueueFullError
from stitch.engines.embedded.model import LoadedModel, load_model
from stitch.types import VersionRef

PROMPTS = [[(7 * at + 3 * which) % 256 for at in range(5 + 3 * which)] for which in range(6)]


@pytest.fixture
def model(tiny_f32: Path) -> LoadedModel:
    """Computes in float32, where results do not depend on the company a row keeps."""
    return load_model(tiny_f32, dtype="float32", view="checkpoint")


def wanted_set(model: LoadedModel) -> list[Wanted]:
    """Half greedy, half drawn with seeds of their own; none ends early."""
    return [
        Wanted(model, prompt, seed=at, temperature=at % 2, ignore_eos=True)
        for at, prompt in enumerate(PROMPTS)
    ]


def run(loop: HandLoop, wanted: list[Wanted]) -> None:
    for _ in range(1000):
        if all(it.done for it in wanted):
            return
        loop.advance()
    raise AssertionError("generation did not end")


def all_at_once(model: LoadedModel, wanted: list[Wanted]) -> None:
    loop = HandLoop(model)
    loop.submit([it.generation for it in wanted])
    run(loop, wanted)


def one_after_another(model: LoadedModel, wanted: list[Wanted]) -> None:
    loop = HandLoop(model)
    for it in wanted:
        loop.submit([it.generation])
        run(loop, [it])


def joining_in_reverse(model: LoadedModel, wanted: list[Wanted]) -> None:
    loop = HandLoop(model)
    for it in reversed(wanted):
        loop.submit([it.generation])
        loop.advance(5)
    run(loop, wanted)


def in_two_slots(model: LoadedModel, wanted: list[Wanted]) -> None:
    loop = HandLoop(model, max_slots=2)
    loop.submit([it.generation for it in wanted])
    run(loop, wanted)


@pytest.mark.parametrize("way", [one_after_another, joining_in_reverse, in_two_slots])
def test_a_request_gets_the_same_tokens_alone_or_in_any_company(
    model: LoadedModel, way: Callable[[LoadedModel, list[Wanted]], None]
) -> None:
    together, apart = wanted_set(model), wanted_set(model)
    all_at_once(model, together)
    way(model, apart)
    for one, other in zip(together, apart, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_greedy_tokens_are_those_of_transformers_own_generate(
    model: LoadedModel, tiny_f32: Path
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_f32, dtype=torch.float32)
    wanted = [Wanted(model, prompt, 0, temperature=0.0, ignore_eos=True) for prompt in PROMPTS]
    all_at_once(model, wanted)
    for it, prompt in zip(wanted, PROMPTS, strict=True):
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=511,
            pad_token_id=0,
        )
        # Our stop was switched off; so is generate's, unless it meets the id named above.
        assert it.tokens == out[0, len(prompt) :].tolist()


def test_choices_of_one_prompt_compute_it_once_and_still_match_those_alone(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group() -> list[Wanted]:
        return [Wanted(model, PROMPTS[2], seed, ignore_eos=True) for seed in range(4)]

    alone, together = group(), group()
    one_after_another(model, alone)
    lengths: list[int] = []
    forward = LoadedModel.forward

    def counted(self: LoadedModel, pool: Any, rows: Any, tokens: Any, positions: Any) -> Any:
        lengths.append(len(tokens))
        return forward(self, pool, rows, tokens, positions)

    monkeypatch.setattr(LoadedModel, "forward", counted)
    all_at_once(model, together)
    assert lengths[:2] == [len(PROMPTS[2]), 4]
    assert [it.tokens for it in together] == [it.tokens for it in alone]


def test_each_token_is_labelled_with_the_weights_that_made_it(model: LoadedModel) -> None:
    before, during = (Wanted(model, PROMPTS[0], 0, temperature=0.0, ignore_eos=True) for _ in "ab")
    loop = HandLoop(model)
    loop.ref = VersionRef("run", 4)
    loop.submit([before.generation])
    run(loop, [before])
    loop.submit([during.generation])
    loop.advance(7)

    def update() -> None:
        with torch.no_grad():
            model.model.lm_head.weight.neg_()
        loop.ref = VersionRef("run", 5)

    loop.call(update)
    run(loop, [during])
    assert during.versions == [4] * 7 + [5] * 17
    assert during.tokens[:7] == before.tokens[:7]
    assert during.logprobs[:7] == before.logprobs[:7]
    # The first token under the new weights was the least likely one under the old.
    assert during.tokens[7] != before.tokens[7]


def test_weights_change_also_when_nothing_is_running(model: LoadedModel) -> None:
    loop = DecodeLoop(model, max_slots=1, max_len=16, max_queue=1)
    loop.start()
    try:
        assert loop.call(lambda: 42).result(timeout=30) == 42
    finally:
        loop.stop()


def test_a_call_that_fails_raises_where_it_is_awaited_and_the_loop_goes_on(
    model: LoadedModel,
) -> None:
    loop = DecodeLoop(model, max_slots=1, max_len=16, max_queue=1)
    loop.start()
    try:
        with pytest.raises(ZeroDivisionError):
            loop.call(lambda: 1 // 0).result(timeout=30)
        assert loop.call(lambda: 42).result(timeout=30) == 42
    finally:
        loop.stop()


def test_an_error_in_one_requests_sampling_ends_that_request_only(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Wanted(model, PROMPTS[1], 1, temperature=1.0, ignore_eos=True)
    all_at_once(model, [alone])
    good, bad = (Wanted(model, PROMPTS[1], 1, temperature=1.0, ignore_eos=True) for _ in "ab")
    calls = iter(range(100))

    def fail_late(*_: object) -> None:
        if next(calls) == 3:
            raise ZeroDivisionError("on purpose")
        return pick(*_)

    pick = bad.generation.sampler.pick
    monkeypatch.setattr(bad.generation.sampler, "pick", fail_late)
    loop = HandLoop(model)
    loop.submit([bad.generation, good.generation])
    run(loop, [good, bad])
    assert isinstance(bad.events[-1], Failed)
    assert len(bad.events) == 4
    assert good.tokens == alone.tokens
    assert loop.num_running == 0


def test_a_failing_step_ends_its_requests_and_the_next_ones_are_served(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = HandLoop(model)
    lost = Wanted(model, PROMPTS[0], 0)
    with monkeypatch.context() as patch:
        patch.setattr(model.model, "forward", lambda **_: 1 // 0)
        loop.submit([lost.generation])
        loop.advance()
    assert isinstance(lost.events[-1], Failed)
    served = Wanted(model, PROMPTS[0], 0)
    loop.submit([served.generation])
    run(loop, [served])
    assert len(served.tokens) > 0


def test_steps_that_keep_failing_end_the_process(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exit_loudly(reason: str) -> None:
        raise SystemExit(reason)

    monkeypatch.setattr(loop_module, "exit_loudly", exit_loudly)
    monkeypatch.setattr(model.model, "forward", lambda **_: 1 // 0)
    loop = HandLoop(model)

    def fail() -> None:
        loop.submit([Wanted(model, PROMPTS[0], 0).generation])
        loop.advance()

    fail()
    fail()
    with pytest.raises(SystemExit, match="3 decoding steps"):
        fail()


def test_weights_that_are_not_finite_fail_requests_and_not_the_engine(model: LoadedModel) -> None:
    with torch.no_grad():
        model.model.lm_head.weight[5] = math.nan
    it = Wanted(model, PROMPTS[0], 0)
    loop = HandLoop(model)
    loop.submit([it.generation])
    loop.advance()
    assert isinstance(it.events[-1], Failed)
    assert "finite" in it.events[-1].message


def test_more_requests_than_slots_wait_in_order(model: LoadedModel) -> None:
    loop = HandLoop(model, max_slots=1)
    wanted = [Wanted(model, PROMPTS[0], 0, max_tokens=2, ignore_eos=True) for _ in range(3)]
    loop.submit([it.generation for it in wanted])
    loop.advance()
    assert (loop.num_running, loop.num_waiting) == (1, 2)
    ends = []
    for _ in range(6):
        loop.advance()
        ends += [at for at, it in enumerate(wanted) if it.done and at not in ends]
    assert ends == [0, 1, 2]


def test_a_full_queue_refuses_and_takes_nothing_of_the_request(model: LoadedModel) -> None:
    loop = HandLoop(model, max_slots=1, max_queue=2)
    first = [Wanted(model, PROMPTS[0], 0) for _ in range(3)]
    loop.submit([it.generation for it in first])
    with pytest.raises(QueueFullError):
        loop.submit([Wanted(model, PROMPTS[0], 0).generation])
    assert loop.num_waiting == 3


def test_leaving_frees_the_slot_also_while_queued(model: LoadedModel) -> None:
    loop = HandLoop(model, max_slots=1)
    running, queued, last = (Wanted(model, PROMPTS[0], 0, ignore_eos=True) for _ in range(3))
    loop.submit([running.generation, queued.generation, last.generation])
    loop.advance(2)
    loop.abort([running.generation, queued.generation])
    run(loop, [last])
    assert len(running.tokens) == 2
    assert queued.tokens == []
    assert (loop.num_running, loop.num_waiting) == (0, 0)


def test_the_end_token_ends_a_choice_and_belongs_to_its_tokens(model: LoadedModel) -> None:
    free = Wanted(model, PROMPTS[0], 0, temperature=0.0, ignore_eos=True)
    all_at_once(model, [free])
    ender = free.tokens[4]
    first = free.tokens.index(ender)
    stopped = Wanted(
        model, PROMPTS[0], 0, temperature=0.0, ignore_eos=True, stop_token_ids=frozenset({ender})
    )
    all_at_once(model, [stopped])
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.outputs[-1].finish == "stop"
    assert free.outputs[-1].finish == "length"


def test_min_tokens_keeps_the_end_away(model: LoadedModel) -> None:
    free = Wanted(model, PROMPTS[0], 0, temperature=0.0, ignore_eos=True)
    all_at_once(model, [free])
    ender = free.tokens[0]
    held = Wanted(
        model,
        PROMPTS[0],
        0,
        temperature=0.0,
        stop_token_ids=frozenset({ender}),
        min_tokens=6,
    )
    all_at_once(model, [held])
    assert len(held.tokens) >= 6
    assert ender not in held.tokens[:6]
