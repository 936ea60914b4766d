"""The engine contract on a real vLLM: tied and untied, a mixture of experts, one and two ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import ClassVar

import pytest
from real_kit import RealVllm
from real_models import make_model

from stitch.testing.engine_contract import EngineContract, Subject


class _OnVllm(EngineContract):
    kind: ClassVar[str]
    tp: ClassVar[int]

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVllm]:
        """One engine for the whole class; its first test finds it unbound."""
        place = tmp_path_factory.mktemp(f"{cls.kind}-{cls.tp}")
        server = RealVllm(make_model(cls.kind, place / "model"), place / "log", tp=cls.tp)
        yield server
        server.stop()

    @pytest.fixture
    async def subject(self, server: RealVllm) -> AsyncIterator[Subject]:
        subject = await server.fresh()
        yield subject
        await subject.engine.close()


class TestTiedOnOneRank(_OnVllm):
    kind, tp = "tied", 1


class TestUntiedOnTwoRanks(_OnVllm):
    kind, tp = "untied", 2


class TestExpertsOnOneRank(_OnVllm):
    kind, tp = "moe", 1


class TestExpertsOnTwoRanks(_OnVllm):
    kind, tp = "moe", 2
