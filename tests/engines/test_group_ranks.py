"""The engine contract on ranks of small torch models that keep weights as real engines do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from engine_kit import TOKEN, Served
from group_kit import FakeWorkers, asgi_app
from placement_kit import Layout, built, checkpoint, live_bits, pairs, same_bits

from stitch.codec import DigestState
from stitch.engines.control import ControlClient
from stitch.engines.group.control_asgi import ControlAsgi
from stitch.engines.group.engine import GroupEngine, GroupTraits
from stitch.engines.ranks.weights import RankWeights
from stitch.errors import UsageError
from stitch.tensors import HostWeights
from stitch.testing.engine_contract import BASE, NEXT, EngineContract, Subject, flip_update


class InProcess:
    """A rank as FakeWorkers call it."""

    def __init__(self, weights: RankWeights) -> None:
        self.weights = weights

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.weights, method)(*args)


async def group_of(
    layout: Layout, weights: HostWeights, scratch: Path, *, build: bool = True
) -> tuple[GroupEngine, list[Any]]:
    """An engine whose ranks hold `weights` and have learned where."""
    models = [built(layout, rank, pairs(weights)) for rank in range(layout.world)]
    ranks = [
        RankWeights(
            model,
            weights.schema,
            rank=rank,
            world=layout.world,
            load=model.load_weights,
            reader=weights,
            build=(lambda fed, rank=rank: built(layout, rank, fed)) if build else None,
        )
        for rank, model in enumerate(models)
    ]
    workers = FakeWorkers([InProcess(rank) for rank in ranks])
    traits = GroupTraits(engine="in-process", salt_field="cache_salt")
    engine = await GroupEngine.learned(workers, weights.schema, traits, scratch=scratch)
    return engine, models


class _OnRanks(EngineContract):
    layout: ClassVar[Layout]

    @pytest.fixture
    async def subject(self, tmp_path: Path) -> AsyncIterator[Subject]:
        weights = checkpoint(self.layout)
        engine, _ = await group_of(self.layout, weights, tmp_path)
        control = ControlAsgi(TOKEN)
        control.serve(engine, weights.schema)
        async with Served(asgi_app(control)) as url:
            client = ControlClient(url, TOKEN, schema=weights.schema)
            yield Subject(engine=client, weights=checkpoint(self.layout))
            await client.close()


class TestTiedOnOneRank(_OnRanks):
    layout = Layout()


class TestUntiedOnTwoRanks(_OnRanks):
    layout = Layout(world=2, tied=False)


class TestRepackedExpertsOnTwoRanks(_OnRanks):
    layout = Layout(world=2, experts=True, repack=True)


async def test_every_live_bit_is_that_of_a_fresh_load(tmp_path: Path) -> None:
    layout = Layout(world=2, experts=True, repack=True)
    weights = checkpoint(layout)
    engine, models = await group_of(layout, checkpoint(layout), tmp_path)
    await engine.bind(BASE, DigestState.of(weights).version_digest())
    update = flip_update(weights, 1, per_tensor=50)
    await engine.stage("a", BASE, NEXT, update)
    await engine.commit("a")
    update.apply(weights)
    for rank, model in enumerate(models):
        assert same_bits(live_bits(model), live_bits(built(layout, rank, pairs(weights))))


async def test_an_engine_with_tensors_that_no_map_reaches_names_them_and_is_not_bound(
    tmp_path: Path,
) -> None:
    """Without a second model, experts that are repacked after the load cannot be followed."""
    layout = Layout(experts=True, repack=True)
    weights = checkpoint(layout)
    engine, _ = await group_of(layout, weights, tmp_path, build=False)
    fixed = (await engine.describe()).fixed_tensors
    assert fixed
    assert all(name.startswith("experts.") for name in fixed)
    with pytest.raises(UsageError, match=r"experts\..* among them"):
        await engine.bind(BASE, DigestState.of(weights).version_digest())
