"""Driving a decode loop by hand: step by step on the test's own thread, so nothing races."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stitch.engines.embedded.generation import Event, Failed, Generation, TokenOut
from stitch.engines.embedded.loop import DecodeLoop
from stitch.engines.embedded.model import LoadedModel
from stitch.engines.embedded.sampling import Sampler, SamplingParams
from stitch.engines.embedded.text import TextStream
from stitch.engines.embedded.vocabulary import Vocabulary


class HandLoop(DecodeLoop):
    """A loop whose thread is never started; `advance` makes steps."""

    def __init__(self, model: LoadedModel, *, max_slots: int = 16, max_queue: int = 64) -> None:
        super().__init__(model, max_slots=max_slots, max_len=128, max_queue=max_queue)

    def advance(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.turn()


class Wanted:
    """One generation of a test: its tokens as they come."""

    def __init__(self, model: LoadedModel, prompt: Sequence[int], seed: int, **params: Any) -> None:
        settings = SamplingParams(**{"max_tokens": 24, "num_logprobs": 0} | params)
        self.events: list[Event] = []
        self.generation = Generation(
            prompt=list(prompt),
            params=settings,
            sampler=Sampler(settings, seed, model.device),
            text=TextStream(Vocabulary(model.decoder).decode, settings.stop),
            eos_ids=model.eos_ids,
            sink=self.events.append,
        )

    @property
    def outputs(self) -> list[TokenOut]:
        assert not any(isinstance(event, Failed) for event in self.events), self.events
        return [event for event in self.events if isinstance(event, TokenOut)]

    @property
    def tokens(self) -> list[int]:
        return [event.token.token_id for event in self.outputs]

    @property
    def logprobs(self) -> list[float | None]:
        return [event.token.logprob for event in self.outputs]

    @property
    def versions(self) -> list[int | None]:
        return [event.version for event in self.outputs]

    @property
    def done(self) -> bool:
        last = self.events[-1] if self.events else None
        return isinstance(last, Failed) or (last is not None and last.finish is not None)
