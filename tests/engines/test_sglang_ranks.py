"""The SGLang plugin's ranks: sockets, schedulers that are held, the engine contract over both."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from engine_kit import TOKEN, Served
from group_kit import asgi_app
from placement_kit import Layout, built, checkpoint, live_bits, pairs, same_bits
from sglang_kit import MESSAGES, FakeSglang, stand_in

from stitch.codec import DigestState
from stitch.engines.control import ControlClient
from stitch.engines.group.control_asgi import ControlAsgi
from stitch.engines.group.engine import GroupEngine, GroupTraits
from stitch.engines.group.front import start_front
from stitch.engines.group.workers import WorkersLostError
from stitch.engines.ranks.port import check
from stitch.engines.sglang import frames, workers
from stitch.engines.sglang.hold import Hold
from stitch.engines.sglang.rank_server import RankServer, socket_path
from stitch.engines.sglang.scheduler import SchedulerRank
from stitch.engines.sglang.workers import SglangWorkers
from stitch.errors import EngineError
from stitch.tensors import HostWeights, write_checkpoint
from stitch.testing.engine_contract import BASE, NEXT, EngineContract, Subject, flip_update


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A short path, as sockets need one."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        sockets = Path(directory, "sockets")
        sockets.mkdir()
        yield sockets


@dataclass
class Group:
    sglang: FakeSglang
    ranks: list[SchedulerRank]
    workers: SglangWorkers
    engine: GroupEngine
    weights: HostWeights


@asynccontextmanager
async def group_of(layout: Layout, place: Path, sockets: Path) -> AsyncIterator[Group]:
    """An engine over schedulers whose ranks hold a checkpoint's weights."""
    weights = checkpoint(layout)
    write_checkpoint(place / "model", weights)
    sglang = FakeSglang([built(layout, rank, pairs(weights)) for rank in range(layout.world)])
    ranks, servers = [], []
    for number, scheduler in enumerate(sglang.schedulers):
        rank = SchedulerRank(scheduler, number, layout.world)
        scheduler._stitch_rank = rank  # type: ignore[attr-defined]
        ranks.append(rank)
        servers.append(RankServer(sockets, number, rank.answer))
    them = await SglangWorkers.connected(sglang, MESSAGES, sockets, layout.world)
    traits = GroupTraits(engine="sglang", salt_field="extra_key")
    engine, _ = await start_front(them, place / "model", "bf16", traits)
    try:
        yield Group(sglang, ranks, them, engine, checkpoint(layout))
    finally:
        for server in servers:
            server.close()
        for _, writer in them._links:
            writer.close()
        await asyncio.to_thread(sglang.close)


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for the module with the cache of images' embeddings."""
    images = SimpleNamespace(embedding_cache=SimpleNamespace(max_size=7), made=[])
    images.init_mm_embedding_cache = images.made.append
    stand_in(monkeypatch, srt__managers__mm_schedule=vars(images))
    return images


class _OnSchedulers(EngineContract):
    layout: ClassVar[Layout]

    @pytest.fixture
    async def subject(self, tmp_path: Path, sockets: Path) -> AsyncIterator[Subject]:
        async with group_of(self.layout, tmp_path, sockets) as group:
            control = ControlAsgi(TOKEN)
            control.serve(group.engine, group.weights.schema)
            async with Served(asgi_app(control)) as url:
                client = ControlClient(url, TOKEN, schema=group.weights.schema)
                yield Subject(engine=client, weights=group.weights)
                await client.close()


class TestTiedOnOneRank(_OnSchedulers):
    layout = Layout()


class TestUntiedOnTwoRanks(_OnSchedulers):
    layout = Layout(world=2, tied=False)


@pytest.fixture
async def group(tmp_path: Path, sockets: Path) -> AsyncIterator[Group]:
    async with group_of(Layout(world=2, tied=False), tmp_path, sockets) as group:
        await group.engine.bind(BASE, DigestState.of(group.weights).version_digest())
        yield group


async def test_a_commit_is_one_pause_with_empty_caches_and_no_step_in_it(
    group: Group, images: SimpleNamespace
) -> None:
    update = flip_update(group.weights, 1)
    await group.engine.stage("a", BASE, NEXT, update)
    flushes = [len(scheduler.flushes) for scheduler in group.sglang.schedulers]
    group.sglang.step()
    await group.engine.commit("a")
    group.sglang.step()
    await group.engine.roll_back(BASE)
    await asyncio.to_thread(group.sglang.close)
    for rank, scheduler in enumerate(group.sglang.schedulers):
        assert scheduler.versions == ["0", "1", "0"]
        assert scheduler.flushes[flushes[rank] :] == [["0"], ["1"]]
        assert scheduler.steps == 2
        assert not scheduler.is_paused
        assert scheduler.grammar_manager.grammar_queue == ["a request waits for its grammar"]
    assert group.sglang.version == "0"
    assert set(images.made) == {7}
    group.sglang._threads.clear()


async def test_every_live_bit_is_that_of_a_fresh_load(group: Group) -> None:
    update = flip_update(group.weights, 1, per_tensor=50)
    await group.engine.stage("a", BASE, NEXT, update)
    await group.engine.commit("a")
    update.apply(group.weights)
    for rank, scheduler in enumerate(group.sglang.schedulers):
        fresh = built(Layout(world=2, tied=False), rank, pairs(group.weights))
        assert same_bits(live_bits(scheduler.tp_worker.model_runner.model), live_bits(fresh))


async def test_caches_that_cannot_be_emptied_leave_the_engine_at_its_version(group: Group) -> None:
    await group.engine.stage("a", BASE, NEXT, flip_update(group.weights, 1))
    group.sglang.schedulers[1].in_use = True
    with pytest.raises(EngineError, match=r"did not pause.*rank 1.*in use"):
        await group.engine.commit("a")
    it = await group.engine.describe()
    assert (it.ref, it.state) == (BASE, "ready")
    assert (await group.engine.verify()).digest == DigestState.of(group.weights).version_digest()
    group.sglang.schedulers[1].in_use = False
    await group.engine.stage("b", BASE, NEXT, flip_update(group.weights, 1))
    await group.engine.commit("b")


async def test_a_scheduler_that_does_not_pause_in_time_is_not_written(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    await group.engine.stage("a", BASE, NEXT, flip_update(group.weights, 1))
    monkeypatch.setattr(workers, "PAUSE_S", 0.05)
    kept: list[Any] = []

    async def pause_generation(message: Any) -> None:
        kept.append(message)

    monkeypatch.setattr(group.sglang, "pause_generation", pause_generation)
    with pytest.raises(EngineError, match=r"did not pause.*not paused"):
        await group.engine.commit("a")
    # The pause that comes after all is not ours any more: nobody would end it.
    group.sglang._inbox.put(kept[0])
    group.sglang._inbox.put(("continue", False))
    group.sglang.step()
    await asyncio.to_thread(group.sglang.close)
    assert [scheduler.steps for scheduler in group.sglang.schedulers] == [1, 1]
    group.sglang._threads.clear()


async def test_a_commit_outside_of_a_pause_is_refused(group: Group) -> None:
    await group.engine.stage("a", BASE, NEXT, flip_update(group.weights, 1))
    with pytest.raises(EngineError, match="not paused"):
        check(await group.workers.call("commit", "a"))


async def test_a_rank_that_ends_without_an_answer_is_noticed(sockets: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_path(sockets, 0))
        listener.listen(1)
        them = await SglangWorkers.connected(None, MESSAGES, sockets, 1)
        rank, _ = listener.accept()
        assert them.is_alive()
        call = asyncio.create_task(them.call("commit", "a"))
        await asyncio.to_thread(frames.receive, rank)
        rank.close()
        with pytest.raises(WorkersLostError, match="broke off"):
            await call
    assert not them.is_alive()
    with pytest.raises(WorkersLostError):
        await them.call("describe")
    them._links[0][1].close()


async def test_a_rank_that_is_a_call_behind_is_noticed(sockets: Path) -> None:
    def behind(number: int, method: str, args: Any) -> dict[str, Any]:
        return {"ok": True, "call": number - 1, "at_rank": 0}

    server = RankServer(sockets, 0, behind)
    them = await SglangWorkers.connected(None, MESSAGES, sockets, 1)
    with pytest.raises(WorkersLostError, match="answers of other calls"):
        await them.call("describe")
    server.close()
    them._links[0][1].close()


async def test_sockets_are_gone_once_all_ranks_are_connected(sockets: Path) -> None:
    with pytest.raises(WorkersLostError, match="rank 0 does not listen"):
        await SglangWorkers.connected(None, MESSAGES, sockets, 1)
    server = RankServer(sockets, 0, lambda *call: {})
    them = await SglangWorkers.connected(None, MESSAGES, sockets, 1)
    assert not os.access(sockets, os.F_OK)
    server.close()
    them._links[0][1].close()


def test_a_hold_does_calls_in_the_schedulers_thread_until_it_is_released() -> None:
    hold = Hold()
    hold.enter()  # a pause that nobody expected passes by
    with pytest.raises(EngineError, match="not paused"):
        hold.run(lambda: {"ok": True})
    hold.expect()
    thread = threading.Thread(target=hold.enter)
    thread.start()
    found = hold.run(lambda: {"ok": True, "thread": threading.get_ident()}, 60)
    assert found["thread"] == thread.ident
    assert hold.is_held

    def fails() -> Any:
        raise RuntimeError("broken")

    assert hold.run(fails)["error"] == "RuntimeError: broken"
    assert hold.run(lambda: {"ok": True})["ok"]
    hold.release()
    thread.join(60)
    assert not thread.is_alive()
    assert not hold.is_held


def test_frames_end_where_the_connection_does() -> None:
    here, there = socket.socketpair()
    here.sendall(frames.frame({"call": 1, "text": "ä" * 100}))
    assert frames.receive(there) == {"call": 1, "text": "ä" * 100}
    here.sendall(frames.frame({"call": 2})[:-1])
    here.close()
    assert frames.receive(there) is None
    there.close()


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[]"])
def test_frames_that_make_no_sense_are_refused(data: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(data)
        with pytest.raises(EngineError):
            frames.receive(there)


@pytest.mark.parametrize("held", [True, False])
def test_a_rank_left_alone_in_a_pause_ends(held: bool, sockets: Path) -> None:
    code = (
        "import sys, threading; from stitch.engines.sglang.rank_server import RankServer; "
        f"RankServer(sys.argv[1], 0, lambda *call: {{}}, must_end=lambda: {held}); "
        "print('ready', flush=True); input(); print('went on', flush=True)"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, os.fspath(sockets)], **pipes) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        with socket.socket(socket.AF_UNIX) as front:
            front.connect(os.fspath(sockets / "0"))
        if held:
            assert rank.wait(60) == 70
        else:
            # It takes the next caller.
            with socket.socket(socket.AF_UNIX) as front:
                front.connect(os.fspath(sockets / "0"))
                front.sendall(frames.frame({"call": 1, "method": "describe", "args": []}))
                assert frames.receive(front) == {}
            assert rank.communicate(b"\n", timeout=60)[0] == b"went on\n"
