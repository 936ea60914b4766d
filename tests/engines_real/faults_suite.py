"""Faults in each phase of a transaction on a real engine: it serves the old version, or ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from faults import FAULT_ENV, FaultPlugin
from real_kit import PROMPTS, RealEngine, digest_of, wait_for_the_end_of
from real_models import load, make_model, real_change

from stitch.codec import TensorUpdate, UpdateSet
from stitch.engines.control import ControlClient
from stitch.engines.group.ending import descendants
from stitch.errors import EngineError, EngineUnreachableError, StitchError
from stitch.testing.engine_contract import BASE, NEXT


class Faulty:
    """An engine of two ranks whose commits can be made to fail.

    `plugin` gives the arguments and the environment that put faults into its ranks.
    """

    def __init__(
        self, engine: type[RealEngine], plugin: FaultPlugin, place: Path, **env: str
    ) -> None:
        args, environment = plugin(place)
        self.fault = place / "fault"
        self.model = make_model("tied", place / "model")
        self.server = engine(
            self.model,
            place / "log",
            tp=2,
            args=args,
            env={FAULT_ENV: str(self.fault), **environment, **env},
        )
        self.weights = load(self.model)
        self.update = real_change(self.weights, seed=1)

    async def staged(self) -> ControlClient:
        client = self.server.client()
        await client.bind(BASE, digest_of(self.weights))
        await client.stage("a", BASE, NEXT, self.update)
        return client


class WithFaults:
    engine: ClassVar[type[RealEngine]]
    plugin: ClassVar[FaultPlugin]

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
        faulty = Faulty(cls.engine, cls.plugin, tmp_path_factory.mktemp("faults"))
        yield faulty
        faulty.server.stop()

    @pytest.mark.parametrize("rank", [0, 1])
    async def test_a_rank_that_fails_in_the_write_leaves_all_at_the_old_version(
        self, shared: Faulty, rank: int
    ) -> None:
        before = [shared.server.tokens(prompt) for prompt in PROMPTS]
        client = await shared.staged()
        shared.fault.write_text(f"{rank} raise")
        with pytest.raises(EngineError, match=f"rank {rank}.*injected"):
            await client.commit("a")
        now, report = await client.describe(), await client.verify()
        assert (now.ref, now.state, now.staged) == (BASE, "ready", None)
        assert report.digest == digest_of(shared.weights)
        assert [shared.server.tokens(prompt) for prompt in PROMPTS] == before
        # And nothing is broken for good:
        await client.stage("b", BASE, NEXT, shared.update)
        await client.commit("b")
        await client.roll_back(BASE)
        assert (await client.verify()).digest == digest_of(shared.weights)
        await client.close()

    async def test_health_survives_a_pause_and_requests_wait_for_its_end(
        self, shared: Faulty
    ) -> None:
        server, client = shared.server, await shared.staged()
        old = server.tokens(PROMPTS[0])
        shared.fault.write_text("1 wait")
        commit = asyncio.create_task(client.commit("a"))
        while shared.fault.exists():  # noqa: ASYNC110 - until the rank, a process, has seen it
            await asyncio.sleep(0.01)
        assert (await client.describe()).state == "committing"
        request = asyncio.create_task(asyncio.to_thread(server.tokens, PROMPTS[0]))
        assert await asyncio.to_thread(server.health) == 200
        shared.fault.write_text("go on")
        await commit
        assert await request != old
        assert (await client.describe()).state == "ready"
        await client.roll_back(BASE)
        assert await asyncio.to_thread(server.tokens, PROMPTS[0]) == old
        shared.fault.unlink()
        await client.close()

    async def test_bad_stages_change_nothing(self, shared: Faulty) -> None:
        client = await shared.staged()
        good = shared.update.updates[0]
        lie = TensorUpdate(
            tensor=good.tensor,
            positions=good.positions,
            new=good.new,
            old=good.old ^ good.old.dtype.type(1),
        )
        with pytest.raises(EngineError):
            await client.stage("lie", BASE, NEXT, UpdateSet([lie]))
        with pytest.raises(EngineError):
            await client.stage("elsewhere", NEXT, BASE, shared.update)
        with pytest.raises(StitchError):
            await client._call("POST", "stage", {"stage_id": "c"})
        opening = {"stage_id": "d", "base": {"run": "contract", "version": 0}}
        await client._call(
            "POST", "stage", {**opening, "target": {"run": "contract", "version": 1}}
        )
        await client._call("PUT", "stage/d/parts/0", b"no update set")
        with pytest.raises(StitchError):
            await client._call("POST", "stage/d/seal", {"num_parts": 1, "num_changed": 0})
        assert (await client.describe()).staged is None
        assert (await client.verify()).digest == digest_of(shared.weights)
        await client.close()

    @pytest.mark.parametrize("fault", ["0 garble", "1 kill", "failpoint"])
    async def test_an_engine_in_doubt_ends_with_all_its_processes(
        self, fault: str, tmp_path: Path
    ) -> None:
        env: dict[str, Any] = {"STITCH_FAILPOINT": "engine.written"} if fault == "failpoint" else {}
        faulty = Faulty(self.engine, type(self).plugin, tmp_path, **env)
        try:
            processes = descendants(faulty.server.process.pid)
            assert len(processes) >= 3
            client = await faulty.staged()
            faulty.fault.write_text(fault)
            with pytest.raises(EngineUnreachableError):
                await client.commit("a")
            await client.close()
            status = faulty.server.process.wait(60)
            wait_for_the_end_of(processes)
            if fault != "failpoint":
                assert status == 70
                assert "stitch engine: fatal" in faulty.server.tail()
        finally:
            faulty.server.stop()
