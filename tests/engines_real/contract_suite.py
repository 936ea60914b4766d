"""The engine contract on a real engine, and its answers against those of fresh ones.

Subclasses name an engine, a kind of model and a number of ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from real_kit import PROMPTS, RealEngine, digest_of
from real_models import make_model, save
from requests_suite import LONG_PROMPT, NUM_PATCHES, advance, at

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
        weights = subject.weights
        found, checkpoints = {0: answers(server)}, {}
        await subject.engine.bind(at(0), digest_of(weights))
        for version in range(1, NUM_PATCHES + 1):
            await advance(subject.engine, weights, version)
            if version in (1, NUM_PATCHES):
                assert (await subject.engine.verify()).digest == digest_of(weights)
                found[version] = answers(server)
                checkpoints[version] = save(weights, server.model, tmp_path / f"v{version}")
        assert found[0] != found[1] != found[NUM_PATCHES]
        for version, checkpoint in checkpoints.items():
            log = tmp_path / f"log-{version}"
            fresh = await asyncio.to_thread(type(server), checkpoint, log, tp=self.tp)
            try:
                assert answers(fresh) == found[version], f"version {version}"
            finally:
                fresh.stop()
