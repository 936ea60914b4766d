"""The engine contract on a real engine, and its answers against those of fresh ones.

Subclasses name an engine, a kind of model and a number of ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from equality import equal_to_fresh_engines_after_1_and_20_patches
from real_kit import PROMPTS, RealEngine
from real_models import make_model
from requests_suite import LONG_PROMPT

from stitch.testing.engine_contract import EngineContract, Subject


def answers(server: RealEngine) -> list[list[int]]:
    return [server.tokens(prompt) for prompt in (*PROMPTS, LONG_PROMPT)]


class OnRealEngine(EngineContract):
    engine: ClassVar[type[RealEngine]]
    kind: ClassVar[str]
    tp: ClassVar[int]

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
        """One engine for the whole class; its first test finds it unbound."""
        place = tmp_path_factory.mktemp(f"{cls.kind}-{cls.tp}")
        server = cls.engine(make_model(cls.kind, place / "model"), place / "log", tp=cls.tp)
        yield server
        server.stop()

    @pytest.fixture
    async def subject(self, server: RealEngine) -> AsyncIterator[Subject]:
        subject = await server.fresh()
        yield subject
        await subject.engine.close()

    async def test_tokens_equal_those_of_a_fresh_engine_after_1_and_20_patches(
        self, server: RealEngine, subject: Subject, tmp_path: Path
    ) -> None:
        async def live() -> list[list[int]]:
            return answers(server)

        async def fresh(checkpoint: Path) -> list[list[int]]:
            log = tmp_path / "log"
            other = await asyncio.to_thread(type(server), checkpoint, log, tp=self.tp)
            try:
                return answers(other)
            finally:
                other.stop()

        await equal_to_fresh_engines_after_1_and_20_patches(
            subject.engine, subject.weights, server.model, tmp_path, live, fresh
        )
