"""A replica follows the board's current run, and says which run each answer came from."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from replica_kit import DEADLINE_S, Replica, engine_at, replica_of, served, until
from test_replica_kill import serving, until_served

from stitch.board import open_board
from stitch.publish import Publisher, write_anchor
from stitch.replica.heartbeats import HeartbeatWriter
from stitch.replica.state import ReplicaStatus
from stitch.tensors import HostWeights, write_safetensors
from stitch.testing.fake_engine import FakeEngine
from stitch.testing.published import PublishedRun, copy_of, digest_of
from stitch.testing.synthetic import adam_step, synthetic_schema, synthetic_weights
from stitch.types import ReplicaState, VersionRef


def changed(weights: HostWeights, seed: int) -> HostWeights:
    new = copy_of(weights)
    adam_step(new, 0.02, seed=seed)
    return new


def begin(
    published: PublishedRun, run: str, *versions: HostWeights, **how: Any
) -> list[HostWeights]:
    """Start a run, which becomes the current one, and publish into it."""
    with Publisher.start(published.board, run, threads=1, **how) as publisher:
        for weights in versions:
            publisher.publish(weights).wait(DEADLINE_S)
    return list(versions)


async def serves(replica: Replica, ref: VersionRef, weights: HostWeights) -> None:
    """It serves exactly these weights under this name; its own proof and the board agree."""
    await until(lambda: replica.app.status.ref == ref, f"serving {ref}")
    assert digest_of(replica.engine.weights) == digest_of(weights)
    assert replica.engine.ref == ref
    status, proof = await replica.post("/verify")
    assert status == 200
    assert (proof["run"], proof["version"], proof["equal"]) == (ref.run, ref.version, True)


@pytest.mark.parametrize("forked_at", [3, 1])
async def test_it_goes_over_to_a_fork_in_one_commit(
    published: PublishedRun, forked_at: int
) -> None:
    """Forked where the engine stands: patches lead on. Forked before: it starts from the base."""
    async with replica_of(published) as replica:
        await replica.serves(3)
        (last,) = await asyncio.to_thread(
            begin, published, "f", changed(published.weights[forked_at], 50),
            parent=f"r@{forked_at}",
        )  # fmt: skip
        await serves(replica, VersionRef("f", 1), last)
        assert [(c.from_version, c.version) for c in replica.app.status.commits] == [(0, 3), (3, 1)]
        status, body = await replica.complete()
        assert (status, body["weight_run"], body["weight_version_start"]) == (200, "f", 1)
        assert "weight_run_end" not in body
        async with replica.client.post("/v1/completions", json={"prompt": "p"}) as got:
            assert got.headers["X-Stitch-Run"] == "f"
            assert "X-Stitch-Run-End" not in got.headers
        health = (await replica.get("/health"))[1]
        assert (health["run"], health["applied"], health["lag"]) == ("f", 1, 0)
        run = published.board.open_run("f")
        await until(lambda: [b.run for b in run.heartbeats()] == ["f"], "a heartbeat in the fork")
        await until(lambda: not published.run.heartbeats(), "no heartbeat in the old run")
    assert run.heartbeats() == []


async def test_after_a_change_of_runs_it_says_at_once_that_it_serves(
    published: PublishedRun,
) -> None:
    async with replica_of(published) as replica:
        await replica.serves(3)
        reconciler, status = replica.app.reconciler, replica.app.status
        states: list[ReplicaState] = []
        real = reconciler._pause

        async def pause(seconds_s: float) -> None:
            states.append(status.state)
            await real(seconds_s)

        reconciler._pause = pause  # type: ignore[method-assign]
        await asyncio.to_thread(begin, published, "f", parent="r@3")
        await until(lambda: status.ref == VersionRef("f", 0))
        num_pauses = len(states)
        await until(lambda: len(states) > num_pauses)
        assert set(states) == {ReplicaState.SERVING}


async def test_it_goes_back_to_the_old_run_when_that_is_resumed(published: PublishedRun) -> None:
    async with replica_of(published) as replica:
        await replica.serves(3)
        (last,) = await asyncio.to_thread(
            begin, published, "f", changed(published.weights[2], 50), parent="r@2"
        )
        await serves(replica, VersionRef("f", 1), last)
        with await asyncio.to_thread(
            Publisher.resume, published.board, "r", published.base, threads=1
        ):
            await serves(replica, VersionRef("r", 3), published.weights[3])


async def test_a_replica_that_starts_late_reaches_a_fork_from_its_ancestors_base(
    published: PublishedRun,
) -> None:
    (last,) = begin(published, "f", changed(published.weights[2], 50), parent="r@2")
    (newer,) = begin(published, "g", changed(last, 51), parent="f@1")
    async with replica_of(published) as replica:
        assert not replica.app.status.ready
        await serves(replica, VersionRef("g", 1), newer)
        assert [c.from_version for c in replica.app.status.commits] == [0]


async def test_an_engine_that_serves_the_old_run_is_proven_there_and_goes_over(
    published: PublishedRun,
) -> None:
    """Its sidecar was restarted after the run had changed."""
    engine = engine_at(published, 3)
    await engine.bind(VersionRef("r", 3), published.digests[3])
    (last,) = begin(published, "f", changed(published.weights[1], 50), parent="r@1")
    async with replica_of(published, engine) as replica:
        await serves(replica, VersionRef("f", 1), last)


async def test_another_run_from_the_same_base_is_reached_from_it(published: PublishedRun) -> None:
    async with replica_of(published) as replica:
        await replica.serves(3)
        (last,) = await asyncio.to_thread(
            begin, published, "again", changed(published.weights[0], 60), base=published.base
        )
        await serves(replica, VersionRef("again", 1), last)


async def test_a_heartbeat_stays_in_a_run_that_was_left_and_is_followed_again(
    published: PublishedRun,
) -> None:
    """Both changes come before one beat."""
    begin(published, "f", parent="r@3")
    runs = {name: published.board.open_run(name) for name in ("r", "f")}
    status = ReplicaStatus(replica="one", run="r", applied=3, newest=3)
    writer = HeartbeatWriter(runs["r"], status, url="http://x", region="", interval_s=5.0)
    try:
        await writer.beat()
        writer.follow(runs["f"])
        writer.follow(published.board.open_run("r"))
        await writer.beat()
        assert [beat.replica for beat in runs["r"].heartbeats()] == ["one"]
        status.run = "f"
        writer.follow(runs["f"])
        await writer.beat()
        assert runs["r"].heartbeats() == []
        assert [beat.replica for beat in runs["f"].heartbeats()] == ["one"]
    finally:
        await writer._worker.close()


def other_base(published: PublishedRun, path: Path) -> HostWeights:
    weights = changed(published.weights[0], 99)
    write_safetensors(path, weights)
    return weights


async def test_without_a_way_it_stays_and_says_why_until_an_anchor_is_there(
    published: PublishedRun, tmp_path: Path
) -> None:
    other = other_base(published, tmp_path / "other.safetensors")
    async with replica_of(published) as replica:
        await replica.serves(3)
        (last,) = await asyncio.to_thread(
            begin, published, "n", changed(other, 61), base=tmp_path / "other.safetensors"
        )
        status = replica.app.status
        await until(lambda: status.state is ReplicaState.ERROR and "run n: " in status.blocked)
        assert "BaseMismatchError" in status.blocked
        assert "there is no usable anchor" in status.blocked
        code, body = await replica.complete()
        assert (code, body["weight_run"], body["weight_version_start"]) == (200, "r", 3)
        run = published.board.open_run("n")
        await asyncio.to_thread(write_anchor, run, other, 0)
        await serves(replica, VersionRef("n", 1), last)
        assert status.blocked == ""


async def test_a_run_of_other_tensors_is_not_followed(
    published: PublishedRun, tmp_path: Path
) -> None:
    path = tmp_path / "larger.safetensors"
    write_safetensors(path, synthetic_weights(synthetic_schema(hidden=16)))
    async with replica_of(published) as replica:
        await replica.serves(3)
        await asyncio.to_thread(begin, published, "n", base=path)
        await until(lambda: "SchemaMismatchError" in replica.app.status.blocked)
        code, body = await replica.complete()
        assert (code, body["weight_run"]) == (200, "r")
        assert digest_of(replica.engine.weights) == published.digests[3]


async def test_a_replica_of_a_named_run_stays_with_it(published: PublishedRun) -> None:
    async with replica_of(published, run="r") as replica:
        await replica.serves(3)
        await asyncio.to_thread(begin, published, "f", parent="r@3")
        code, body = await replica.complete(weight_version={"run": "f"})
        assert (code, body["error"]["reason"]) == (409, "other_run")
        num_looks = replica.app.metrics.polls.value("ok")
        await until(lambda: replica.app.metrics.polls.value("ok") > num_looks + 12)
        assert replica.app.status.ref == VersionRef("r", 3)


@pytest.mark.parametrize("verb", ["stage", "commit"])
async def test_a_failed_change_of_runs_is_undone_and_tried_again(
    published: PublishedRun, verb: str
) -> None:
    engine = engine_at(published, 0)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        setattr(engine.faults, f"{verb}_failures", 2)
        (last,) = await asyncio.to_thread(
            begin, published, "f", changed(published.weights[3], 50), parent="r@3"
        )
        await serves(replica, VersionRef("f", 1), last)
        assert replica.app.metrics.commits.value("failed") == 2


async def test_a_fork_whose_first_version_is_damaged_is_entered_before_it(
    published: PublishedRun,
) -> None:
    weights = changed(published.weights[2], 50)
    begin(published, "f", weights, changed(weights, 51), parent="r@2")
    folder = published.folder(1).parents[2] / "f" / "v/00000002"
    (blob,) = folder.glob("*.patch")
    whole = blob.read_bytes()
    blob.write_bytes(b"x" * len(whole))
    async with replica_of(published) as replica:
        await serves(replica, VersionRef("f", 1), weights)
        await until(lambda: "version 2" in replica.app.status.blocked)
        blob.write_bytes(whole)
        await serves(replica, VersionRef("f", 2), changed(weights, 51))


# --- requests ---------------------------------------------------------------------------------


async def test_a_demand_for_a_run_makes_it_look_for_it_at_once(published: PublishedRun) -> None:
    async with replica_of(published, poll_interval_s=3600.0) as replica:
        await replica.serves(3)
        await asyncio.to_thread(begin, published, "f", parent="r@3")
        for demand, headers in (
            ({"weight_version": {"run": "f", "min_version": 0}}, {}),
            ({}, {"X-Stitch-Run": "f", "X-Stitch-Exact-Version": "0"}),
            ({"weight_version": {"exact_version": 0}}, {"X-Stitch-Run": "f"}),
        ):
            code, body = await replica.post(
                "/v1/completions", {"prompt": "p"} | demand, headers=headers
            )
            if code == 409:
                error = body["error"]
                assert (error["reason"], error["run"], error["target_run"]) == (
                    "other_run", "r", "f",
                )  # fmt: skip
            await until(lambda: replica.app.status.ref == VersionRef("f", 0))
            code, body = await replica.post(
                "/v1/completions", {"prompt": "p"} | demand, headers=headers
            )
            assert (code, body["weight_run"], body["weight_version_start"]) == (200, "f", 0)
        code, body = await replica.complete(weight_version={"run": "r", "min_version": 0})
        assert (code, body["error"]["reason"]) == (409, "other_run")


@pytest.mark.parametrize(
    "demand",
    [
        {"run": "no/name", "min_version": 1},
        {"run": 7},
        {"run": None},
        {"run": "r", "min_version": 1, "exact_version": 1},
        {"min_version": 1, "exact_version": 1},
        {},
    ],
)
async def test_malformed_demands_are_refused(published: PublishedRun, demand: Any) -> None:
    async with replica_of(published) as replica:
        code, body = await replica.complete(weight_version=demand)
        assert (code, body["error"]["type"]) == (400, "ConstraintError")


async def test_demands_in_body_and_headers_must_agree_on_the_run(published: PublishedRun) -> None:
    async with replica_of(published) as replica:
        await replica.serves(3)
        for run, header, code in (("r", "r", 200), ("r", "f", 400), (None, "r", 200)):
            demand: dict[str, Any] = {"min_version": 1} | ({"run": run} if run else {})
            got = await replica.post(
                "/v1/completions",
                {"prompt": "p", "weight_version": demand},
                headers={"X-Stitch-Run": header},
            )
            assert got[0] == code
        assert all("weight_version" not in asked["body"] for asked in replica.engine.requests)


@pytest.mark.parametrize("stamps", [True, False])
@pytest.mark.parametrize("streams", [True, False])
async def test_an_answer_over_a_change_of_runs_names_both(
    published: PublishedRun, stamps: bool, streams: bool
) -> None:
    engine = engine_at(published, 0, stamps_versions=stamps)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        engine.faults.token_gate = gate = asyncio.Semaphore(2)
        request = asyncio.create_task(answered(replica, max_tokens=4, stream=streams))
        await until(lambda: engine.running == 1 and gate.locked())
        await asyncio.to_thread(
            begin, published, "f", changed(published.weights[3], 50), parent="r@3"
        )
        await until(lambda: replica.app.status.ref == VersionRef("f", 1))
        gate.release()
        gate.release()
        stamp = await request
        found = {name: stamp[name] for name in stamp if name.startswith("weight_")}
        assert found == {
            "weight_version_start": 3,
            "weight_version_end": 1,
            "weight_run": "r",
            "weight_run_end": "f",
        }


async def answered(replica: Replica, **fields: Any) -> dict[str, Any]:
    """A JSON answer, or the last stamp of a stream."""
    async with replica.client.post("/v1/completions", json={"prompt": "p"} | fields) as got:
        assert got.headers["X-Stitch-Run"] == "r"
        text = await got.text()
    if not fields["stream"]:
        return json.loads(text)  # type: ignore[no-any-return]
    events = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
    stamps = [json.loads(event) for event in events if "stitch.versions" in event]
    return stamps[-1]  # type: ignore[no-any-return]


async def test_each_run_has_its_own_cache_namespace(published: PublishedRun) -> None:
    engine = engine_at(published, 0, prefix_cache=True)
    weights = changed(published.weights[0], 50)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        await replica.complete(max_tokens=1)
        await asyncio.to_thread(
            begin, published, "f", weights, changed(weights, 1), changed(weights, 2), parent="r@0"
        )
        await until(lambda: replica.app.status.ref == VersionRef("f", 3))
        await replica.complete(max_tokens=1)
        assert [asked["body"]["cache_salt"] for asked in engine.requests] == [
            "stitch.r.3", "stitch.f.3",
        ]  # fmt: skip


async def test_an_idle_poll_stays_one_request(published: PublishedRun) -> None:
    """One in five asks for the current run, instead of the next version."""
    async with replica_of(published) as replica:
        await replica.serves(3)
        status, metrics = replica.app.status, replica.app.metrics
        asked: list[str] = []
        current = replica.app.reconciler._current
        real = current.after
        current.after = lambda run: (asked.append(run.name), real(run))[1]  # type: ignore[method-assign]
        before = metrics.polls.value("ok")
        await until(lambda: metrics.polls.value("ok") >= before + 20)
        num_polls = metrics.polls.value("ok") - before
        assert abs(len(asked) - num_polls / 4) <= 2
        assert status.ready


# --- kills ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failpoint", "served_after"),
    [("replica.staged:2", ("r", 3)), ("replica.committed:2", ("f", 1))],
)
async def test_after_a_kill_in_a_change_of_runs_it_is_old_or_new_and_the_next_goes_on(
    published: PublishedRun, failpoint: str, served_after: tuple[str, int]
) -> None:
    engine = engine_at(published, 0)
    last = changed(published.weights[1], 50)
    by_run = {"r": published.weights[3], "f": last}
    async with served(engine) as url:
        async with serving(published, url, failpoint) as process:
            await until(lambda: engine.ref == VersionRef("r", 3))
            await asyncio.to_thread(begin, published, "f", last, parent="r@1")
            async with asyncio.timeout(DEADLINE_S):
                assert await process.wait() == -signal.SIGKILL
        assert holds(engine, by_run) == served_after
        async with serving(published, url) as process:
            assert process.stdout is not None
            address = (await process.stdout.readline()).decode().strip()
            await until(lambda: engine.ref == VersionRef("f", 1))
            assert holds(engine, by_run) == ("f", 1)
            await proven(address)


def holds(engine: FakeEngine, by_run: dict[str, HostWeights]) -> tuple[str, int]:
    assert engine.ref is not None
    assert digest_of(engine.weights) == digest_of(by_run[engine.ref.run])
    return engine.ref.run, engine.ref.version


async def proven(address: str) -> None:
    import aiohttp

    async with aiohttp.ClientSession(address) as client:
        await until_served(client, 1)
        async with client.post("/verify") as got:
            proof = await got.json()
            assert (proof["run"], proof["version"], proof["equal"]) == ("f", 1, True)


def test_the_boards_current_run_is_that_of_its_highest_epoch(published: PublishedRun) -> None:
    begin(published, "f", parent="r@3")
    current = open_board(published.board.url).current_epoch()
    assert current is not None
    assert current.run == "f"
