"""A group of ranks behind the engine port: old or new on all of them, or gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_kit import TOKEN, Served
from group_kit import ExitedError, FakeWorkers, asgi_app, fake_group

from stitch.codec import DigestState, UpdateSet
from stitch.engines.control import ControlClient
from stitch.engines.group.control_asgi import ControlAsgi
from stitch.engines.group.engine import GroupEngine
from stitch.errors import CorruptPatchError, EngineError, FatalReplicaError, UsageError
from stitch.tensors import HostWeights
from stitch.testing.engine_contract import BASE, NEXT, EngineContract, Subject, flip_update
from stitch.testing.synthetic import synthetic_schema, synthetic_weights

SCHEMA = synthetic_schema(hidden=16, layers=1)


class TestGroupOfOneRank(EngineContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        engine, _ = fake_group(synthetic_weights(SCHEMA), 1, tmp_path)
        return Subject(engine=engine, weights=synthetic_weights(SCHEMA))


class TestGroupOfThreeRanks(EngineContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        engine, _ = fake_group(synthetic_weights(SCHEMA), 3, tmp_path)
        return Subject(engine=engine, weights=synthetic_weights(SCHEMA))


class TestGroupOverAsgi(EngineContract):
    @pytest.fixture
    async def subject(self, tmp_path: Path) -> AsyncIterator[Subject]:
        engine, _ = fake_group(synthetic_weights(SCHEMA), 2, tmp_path)
        control = ControlAsgi(TOKEN)
        control.serve(engine, SCHEMA)
        async with Served(asgi_app(control)) as url:
            client = ControlClient(url, TOKEN, schema=SCHEMA)
            yield Subject(engine=client, weights=synthetic_weights(SCHEMA))
            await client.close()


@dataclass
class Group:
    engine: GroupEngine
    workers: FakeWorkers
    live: HostWeights
    update: UpdateSet
    scratch: Path

    async def bind(self) -> None:
        await self.engine.bind(BASE, digest_of(self.live))

    async def stage(self) -> None:
        await self.engine.stage("a", BASE, NEXT, self.update)

    async def serves(self, weights: HostWeights) -> bool:
        return (await self.engine.verify()).digest == digest_of(weights)


def digest_of(weights: HostWeights) -> str:
    return DigestState.of(weights).version_digest()


@pytest.fixture
async def group(tmp_path: Path) -> Group:
    live = synthetic_weights(SCHEMA)
    engine, workers = fake_group(live, 2, tmp_path)
    group = Group(engine, workers, live, flip_update(synthetic_weights(SCHEMA), 1), tmp_path)
    await group.bind()
    return group


async def test_a_commit_writes_in_a_pause_and_labels(group: Group) -> None:
    await group.stage()
    group.workers.log.clear()
    await group.engine.commit("a")
    assert group.workers.log == ["pause", "commit", "label", "resume"]
    assert not group.workers.written_unpaused
    assert group.workers.refs == [BASE, NEXT]


async def test_staging_does_not_pause_and_leaves_no_file(group: Group) -> None:
    await group.stage()
    assert "pause" not in group.workers.log
    assert list(group.scratch.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
async def test_when_a_rank_cannot_write_all_of_them_return_to_the_old_bits(
    group: Group, rank: int
) -> None:
    await group.stage()
    group.workers.ranks[rank].fails["commit"] = EngineError("rank broke half-way")
    group.workers.log.clear()
    with pytest.raises(EngineError, match=f"undone: rank {rank}: rank broke half-way"):
        await group.engine.commit("a")
    assert group.workers.log == ["pause", "commit", "undo", "resume"]
    assert await group.serves(synthetic_weights(SCHEMA))
    now = await group.engine.describe()
    assert (now.ref, now.state) == (BASE, "ready")


async def test_a_commit_that_was_undone_can_be_repeated(group: Group) -> None:
    await group.stage()
    group.workers.ranks[1].fails["commit"] = EngineError("once")
    with pytest.raises(EngineError, match="once"):
        await group.engine.commit("a")
    await group.engine.stage("b", BASE, NEXT, group.update)
    await group.engine.commit("b")
    new = synthetic_weights(SCHEMA)
    group.update.apply(new)
    assert await group.serves(new)


async def test_a_rank_in_doubt_ends_the_engine(group: Group) -> None:
    await group.stage()
    group.workers.ranks[0].fails["commit"] = FatalReplicaError("half written")
    with pytest.raises(ExitedError, match="half written"):
        await group.engine.commit("a")
    assert (await group.engine.describe()).state == "failed"
    assert "resume" not in group.workers.log


async def test_an_undo_that_fails_ends_the_engine(group: Group) -> None:
    await group.stage()
    group.workers.ranks[0].fails["commit"] = EngineError("cannot write")
    group.workers.ranks[1].fails["undo"] = FatalReplicaError("cannot write back")
    with pytest.raises(ExitedError, match="cannot write back"):
        await group.engine.commit("a")


@pytest.mark.parametrize("method", ["commit", "stage_part", "seal", "lanes", "forget"])
async def test_lost_answers_end_the_engine(group: Group, method: str) -> None:
    if method == "commit":
        await group.stage()
    group.workers.lose.add(method)
    work: dict[str, Any] = {
        "commit": lambda: group.engine.commit("a"),
        "lanes": group.engine.verify,
    }
    with pytest.raises(ExitedError, match="got lost"):
        await work.get(method, group.stage)()
    assert group.workers.exited is not None


async def test_an_engine_that_does_not_pause_goes_on_as_it_was(group: Group) -> None:
    await group.stage()
    group.workers.breaks.add("pause")
    with pytest.raises(EngineError, match=r"did not pause: .*pause broke"):
        await group.engine.commit("a")
    assert group.workers.log[-2:] == ["pause", "resume"]
    assert (await group.engine.describe()).state == "ready"
    assert await group.serves(synthetic_weights(SCHEMA))


@pytest.mark.parametrize("switch", ["resume", "label"])
async def test_an_engine_that_cannot_be_switched_in_a_commit_ends(
    group: Group, switch: str
) -> None:
    await group.stage()
    group.workers.breaks.add(switch)
    with pytest.raises(ExitedError, match=f"{switch} broke"):
        await group.engine.commit("a")


async def test_an_engine_that_does_not_take_a_label_is_not_bound(group: Group) -> None:
    group.workers.breaks.add("label")
    with pytest.raises(RuntimeError, match="label broke"):
        await group.engine.bind(NEXT, digest_of(group.live))
    assert (await group.engine.describe()).ref == BASE


async def test_a_roll_back_is_a_transaction_of_its_own(group: Group) -> None:
    await group.stage()
    await group.engine.commit("a")
    group.workers.log.clear()
    await group.engine.roll_back(BASE)
    assert group.workers.log[:4] == ["pause", "undo", "label", "resume"]
    assert await group.serves(synthetic_weights(SCHEMA))


async def test_a_rank_with_nothing_to_undo_in_a_roll_back_is_a_doubt(group: Group) -> None:
    await group.stage()
    await group.engine.commit("a")
    group.workers.ranks[1].committed = False
    with pytest.raises(ExitedError, match="something to undo"):
        await group.engine.roll_back(BASE)


@pytest.mark.parametrize("method", ["stage_part", "seal"])
async def test_a_stage_that_one_rank_refuses_is_held_by_none(group: Group, method: str) -> None:
    group.workers.ranks[1].fails[method] = CorruptPatchError("bad part")
    with pytest.raises(CorruptPatchError, match="rank 1: bad part"):
        await group.stage()
    assert [rank.stage_id for rank in group.workers.ranks] == [None, None]
    assert (await group.engine.describe()).staged is None
    assert list(group.scratch.iterdir()) == []


async def test_a_scratch_directory_that_is_gone_fails_the_stage_only(group: Group) -> None:
    group.scratch.rmdir()
    with pytest.raises(EngineError, match="cannot hand the update on"):
        await group.stage()
    assert (await group.engine.describe()).state == "ready"


async def test_tensors_that_cannot_be_changed_in_place_are_named(tmp_path: Path) -> None:
    weights = synthetic_weights(SCHEMA)
    name = SCHEMA.tensors[0].name
    refused: dict[str, str] = {}
    engine, _ = fake_group(weights, 2, tmp_path, refused=refused)
    await engine.bind(BASE, digest_of(weights))
    refused[name] = "repacked"
    assert (await engine.describe()).fixed_tensors == (name,)
    with pytest.raises(EngineError, match=f"{name} cannot be changed in place: repacked"):
        await engine.stage("a", BASE, NEXT, flip_update(synthetic_weights(SCHEMA), 1))
    with pytest.raises(UsageError, match=f"{name} among them: repacked"):
        await engine.bind(BASE, digest_of(weights))
