"""The engine contract on a real engine: what a subclass for a kind of model and engine needs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import ClassVar

import pytest
from real_kit import RealEngine
from real_models import make_model

from stitch.testing.engine_contract import EngineContract, Subject


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
