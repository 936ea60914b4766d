"""The engine contract on every implementation: in memory, over HTTP, and the embedded engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_kit import TOKEN, Served, embedded_app

from stitch.engines.control import ControlClient
from stitch.tensors import HostWeights, open_checkpoint
from stitch.testing.engine_contract import EngineContract, Subject
from stitch.testing.fake_engine import FakeEngine, fake_engine_app
from stitch.testing.synthetic import synthetic_schema, synthetic_weights


class TestFakeEngine(EngineContract):
    @pytest.fixture
    def subject(self) -> Subject:
        schema = synthetic_schema(hidden=16, layers=1)
        return Subject(
            engine=FakeEngine(synthetic_weights(schema)), weights=synthetic_weights(schema)
        )


class TestControlOverHttp(EngineContract):
    @pytest.fixture
    async def subject(self) -> AsyncIterator[Subject]:
        schema = synthetic_schema(hidden=16, layers=1)
        engine = FakeEngine(synthetic_weights(schema))
        engine.faults.token_s = 0.001
        async with Served(fake_engine_app(engine, TOKEN)) as url:
            control = ControlClient(url, TOKEN, schema=schema)
            yield Subject(engine=control, weights=synthetic_weights(schema), url=url)
            await control.close()


class TestEmbeddedEngine(EngineContract):
    @pytest.fixture
    async def subject(self, tiny: Path) -> AsyncIterator[Subject]:
        with open_checkpoint(tiny) as checkpoint:
            weights = HostWeights.load(checkpoint)
        async with Served(embedded_app(tiny, dtype="bfloat16", paced=True)) as url:
            control = ControlClient(url, TOKEN, schema=weights.schema)
            yield Subject(engine=control, weights=weights, url=url)
            await control.close()


class TestEmbeddedEngineComputingInFloat32(EngineContract):
    @pytest.fixture
    async def subject(self, tiny: Path) -> AsyncIterator[Subject]:
        with open_checkpoint(tiny) as checkpoint:
            weights = HostWeights.load(checkpoint)
        async with Served(embedded_app(tiny, dtype="float32", paced=True)) as url:
            control = ControlClient(url, TOKEN, schema=weights.schema)
            yield Subject(engine=control, weights=weights, url=url)
            await control.close()
