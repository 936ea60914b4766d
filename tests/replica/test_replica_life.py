"""A whole replica on a board: catching up, following, proving, stopping."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from replica_kit import DEADLINE_S, Replica, engine_at, replica_of, until

from stitch.board import Run
from stitch.publish import Publisher, write_anchor
from stitch.replica.reconciler import MIN_LOOK_INTERVAL_S
from stitch.tensors import write_safetensors
from stitch.testing.published import PublishedRun, copy_of, digest_of, published_run
from stitch.testing.synthetic import adam_step
from stitch.types import ReplicaState, VersionRef


def publish_more(published: PublishedRun, count: int, density: float = 0.02) -> None:
    """Go on with the run."""
    weights = copy_of(published.weights[-1])
    with Publisher.resume(published.board, published.run.name, published.base) as publisher:
        for _ in range(count):
            adam_step(weights, density, seed=100 + len(published.weights))
            publisher.publish(weights).wait()
            published.weights.append(copy_of(weights))
            published.digests.append(digest_of(weights))


async def serves_bits_of(replica: Replica, published: PublishedRun, version: int) -> None:
    """It serves `version`, and both the engine's words and its own proof say so."""
    await replica.serves(version)
    assert digest_of(replica.engine.weights) == published.digests[version]
    status, proof = await replica.post("/verify")
    assert status == 200
    assert proof["equal"] is True
    assert (proof["run"], proof["version"]) == ("r", version)
    assert proof["digest"] == proof["board_digest"] == published.digests[version]


async def test_a_late_joiner_catches_up_in_one_commit_and_then_follows(
    published: PublishedRun,
) -> None:
    async with replica_of(published) as replica:
        await serves_bits_of(replica, published, 3)
        assert [c.version for c in replica.app.status.commits] == [3]
        await asyncio.to_thread(publish_more, published, 1)
        await serves_bits_of(replica, published, 4)
        commits = replica.app.status.commits
        assert [(c.from_version, c.version) for c in commits] == [(0, 3), (3, 4)]
        assert commits[-1].bytes_fetched > 0
        assert commits[-1].num_changed > 0
        assert replica.app.status.ready


async def test_a_replica_fifty_versions_behind_folds_them_into_one_pause(tmp_path: Path) -> None:
    published = published_run(tmp_path, 50, hidden=8)
    async with replica_of(published) as replica:
        await serves_bits_of(replica, published, 50)
        assert len(replica.app.status.commits) == 1


async def test_it_takes_no_traffic_until_it_has_caught_up(published: PublishedRun) -> None:
    engine = engine_at(published, 0)
    engine.faults.hang.add("commit")
    async with replica_of(published, engine) as replica:
        await until(lambda: replica.app.gate.is_closed)
        status, health = await replica.get("/health")
        assert (status, health["state"]) == (503, "CATCHING_UP")
        assert (await replica.get("/live"))[0] == 200
        engine.faults.hang.clear()
        engine.faults.release.set()
        await replica.serves(3)
        assert (await replica.get("/health"))[0] == 200


async def test_it_waits_for_a_run_and_says_so(tmp_path: Path) -> None:
    published = published_run(tmp_path / "elsewhere", 1)
    async with replica_of(published, board=str(tmp_path / "empty")) as replica:
        await until(lambda: replica.app.status.reason == "no run on the board yet")
        assert (await replica.complete())[0] == 503
        published_run(tmp_path / "copy", 0)
        with Publisher.start(str(tmp_path / "empty"), "r", published.base) as publisher:
            publisher.publish(published.weights[1]).wait()
            await replica.post("/wake")
            await replica.serves(1)


async def test_a_named_run_is_waited_for_too(published: PublishedRun) -> None:
    async with replica_of(published, run="other") as replica:
        await until(
            lambda: (
                "no run 'other'" in replica.app.status.reason
                or "other" in replica.app.status.reason
            )
        )
        assert replica.app.status.state is ReplicaState.BOOTING
    async with replica_of(published, run="r") as replica:
        await replica.serves(3)


async def test_a_request_that_is_behind_makes_it_look_at_once(published: PublishedRun) -> None:
    async with replica_of(published, poll_interval_s=3600.0) as replica:
        await replica.serves(3)
        await asyncio.to_thread(publish_more, published, 1)
        status, body = await replica.complete(weight_version={"min_version": 4})
        assert (status, body["error"]["reason"]) == (409, "behind")
        await replica.serves(4)
        status, body = await replica.complete(weight_version={"min_version": 4})
        assert (status, body["weight_version_start"]) == (200, 4)


async def test_wake_makes_it_look_at_once(published: PublishedRun) -> None:
    async with replica_of(published, poll_interval_s=3600.0) as replica:
        await replica.serves(3)
        await asyncio.to_thread(publish_more, published, 1)
        await replica.post("/wake")
        await replica.serves(4)


async def test_versions_that_appear_meanwhile_are_folded_in(
    published: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Run.newest
    looks = 0

    def newest(run: Run, after: int | None = None) -> int:
        nonlocal looks
        looks += 1
        if looks == 1:
            return 1  # the first look comes before versions 2 and 3
        return real(run, after)

    monkeypatch.setattr(Run, "newest", newest)
    async with replica_of(published) as replica:
        await serves_bits_of(replica, published, 3)
        assert [c.from_version for c in replica.app.status.commits] == [0]


async def test_a_commit_in_mid_request_shows_in_start_and_end(published: PublishedRun) -> None:
    engine = engine_at(published, 0)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        engine.faults.token_gate = gate = asyncio.Semaphore(2)
        request = asyncio.create_task(replica.complete(max_tokens=4))
        await until(lambda: engine.running == 1 and gate.locked())
        await asyncio.to_thread(publish_more, published, 1)
        await replica.serves(4)
        gate.release()
        gate.release()
        status, body = await request
        assert status == 200
        assert (body["weight_version_start"], body["weight_version_end"]) == (3, 4)
        spans = body["choices"][0]["weight_versions"]
        assert [span["version"] for span in spans] == [3, 4]


@pytest.mark.parametrize("stamps", [True, False])
async def test_streams_end_with_one_stamp_whoever_writes_it(
    published: PublishedRun, stamps: bool
) -> None:
    engine = engine_at(published, 0, stamps_versions=stamps)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        body = {"prompt": "p", "max_tokens": 3, "stream": True}
        async with replica.client.post("/v1/chat/completions", json=body | {"messages": []}) as got:
            events = (await got.text()).split("\n\n")
        assert events[-2] == "data: [DONE]"
        assert '"stitch.versions"' in events[-3]
        assert '"weight_version_start": 3' in events[-3].replace(":3", ": 3")
        assert sum("stitch.versions" in event for event in events) == 1


async def test_each_version_has_its_own_cache_namespace(published: PublishedRun) -> None:
    engine = engine_at(published, 0, prefix_cache=True)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        for route, body in (
            ("/v1/completions", {"prompt": "p", "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [], "max_tokens": 1}),
        ):
            await replica.post(route, body)
            await replica.post(route, body | {"cache_salt": "mine"})
        await asyncio.to_thread(publish_more, published, 1)
        await replica.serves(4)
        await replica.complete(max_tokens=1)
        salts = [asked["body"]["cache_salt"] for asked in engine.requests]
        assert salts == [
            "stitch.r.3", "mine.stitch.r.3", "stitch.r.3", "mine.stitch.r.3", "stitch.r.4",
        ]  # fmt: skip


async def test_a_queued_stream_and_a_running_one_are_aborted_when_their_clients_leave(
    published: PublishedRun,
) -> None:
    engine = engine_at(published, 0)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        engine.faults.token_gate = asyncio.Semaphore(0)
        request = asyncio.create_task(replica.complete())
        await until(lambda: engine.running == 1)
        request.cancel()
        await until(lambda: engine.aborted == 1)
        assert engine.running == 0


async def test_heartbeats_tell_the_board_and_end_with_a_clean_stop(
    published: PublishedRun,
) -> None:
    async with replica_of(published, region="here") as replica:
        await replica.serves(3)

        def beat() -> Any:
            beats = published.run.heartbeats()
            return beats[0] if beats and beats[0].applied == 3 and beats[0].ready else None

        first = await until(beat)
        assert (first.replica, first.region, first.run) == ("one", "here", "r")
        assert first.url == replica.app.url
        assert first.state is ReplicaState.SERVING
        assert first.versions[-1]["version"] == 3
        later = await until(lambda: (b := beat()) is not None and b.seq > first.seq and b)
        assert later.boot == first.boot
        replica.stop.set()
        async with asyncio.timeout(DEADLINE_S):
            await replica.ended
        assert published.run.heartbeats() == []


async def test_a_stopping_replica_leaves_the_board_before_its_last_requests_end(
    published: PublishedRun,
) -> None:
    engine = engine_at(published, 0)
    async with replica_of(published, engine, drain_s=DEADLINE_S) as replica:
        await replica.serves(3)
        await until(lambda: published.run.heartbeats())
        engine.faults.token_gate = gate = asyncio.Semaphore(0)
        request = asyncio.create_task(replica.complete(max_tokens=1))
        await until(lambda: engine.running == 1)
        replica.stop.set()
        await until(lambda: published.run.heartbeats() == [])
        assert not request.done()
        gate.release()
        status, _ = await request
        assert status == 200


async def test_a_flood_of_wake_ups_is_not_passed_on_to_the_board(
    published: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Run.newest
    num_looks = 0

    def newest(run: Run, after: int | None = None) -> int:
        nonlocal num_looks
        num_looks += 1
        return real(run, after)

    async with replica_of(published, poll_interval_s=3600.0) as replica:
        await replica.serves(3)
        monkeypatch.setattr(Run, "newest", newest)
        began_s = time.monotonic()
        for _ in range(200):
            await replica.post("/wake")
        await until(lambda: num_looks, "a look")
        took_s = time.monotonic() - began_s
        assert num_looks <= took_s / MIN_LOOK_INTERVAL_S + 2


async def test_an_engine_that_outlived_its_sidecar_is_proven_where_it_stands(
    published: PublishedRun,
) -> None:
    engine = engine_at(published, 2)
    await engine.bind(VersionRef("r", 2), published.digests[2])
    async with replica_of(published, engine) as replica:
        await serves_bits_of(replica, published, 3)
        assert [(c.from_version, c.version) for c in replica.app.status.commits] == [(2, 3)]


async def test_an_engine_that_was_started_from_a_later_version_goes_on_from_there(
    published: PublishedRun, tmp_path: Path
) -> None:
    write_safetensors(tmp_path / "at-2.safetensors", published.weights[2])
    engine = engine_at(published, 2)
    async with replica_of(published, engine, model=tmp_path / "at-2.safetensors") as replica:
        await serves_bits_of(replica, published, 3)
        assert [c.from_version for c in replica.app.status.commits] == [2]


async def test_an_engine_that_entered_by_an_anchor_is_proven_by_it_after_a_restart(
    published: PublishedRun, tmp_path: Path
) -> None:
    elsewhere = copy_of(published.weights[0])
    adam_step(elsewhere, 0.1, seed=5)
    write_safetensors(tmp_path / "other.safetensors", elsewhere)
    write_anchor(published.run, published.weights[1], 1)
    engine = engine_at(published, 2)
    await engine.bind(VersionRef("r", 2), published.digests[2])
    async with replica_of(published, engine, model=tmp_path / "other.safetensors") as replica:
        await serves_bits_of(replica, published, 3)
        assert [c.from_version for c in replica.app.status.commits] == [2]


async def test_leftovers_of_an_earlier_sidecar_are_dropped(published: PublishedRun) -> None:
    engine = engine_at(published, 0)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        # A stage that nobody will commit; then a new sidecar on the same engine.
        from stitch.codec import UpdateSet

        await engine.stage("left", VersionRef("r", 3), VersionRef("r", 4), UpdateSet([]))
    await asyncio.to_thread(publish_more, published, 1)
    async with replica_of(published, engine) as replica:
        await serves_bits_of(replica, published, 4)


async def test_an_attached_engine_that_restarts_is_proven_and_caught_up_again(
    published: PublishedRun,
) -> None:
    engine = engine_at(published, 0)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        fresh = engine_at(published, 0)
        engine.boot, engine.weights = fresh.boot, fresh.weights
        engine._ref = engine._undo = None
        await until(lambda: not replica.app.status.caught_up, "noticing the restart")
        await serves_bits_of(replica, published, 3)
        assert replica.app.status.engine is not None
        assert replica.app.status.engine.boot == fresh.boot


async def test_an_engine_that_restarts_while_it_is_caught_up_is_proven_again(
    published: PublishedRun,
) -> None:
    engine = engine_at(published, 0)
    engine.faults.stage_failures = 10**6
    async with replica_of(published, engine) as replica:
        await until(lambda: replica.app.metrics.commits.value("failed") >= 1)
        fresh = engine_at(published, 0)
        engine.boot, engine.weights, engine._ref = fresh.boot, fresh.weights, None
        engine.faults.stage_failures = 0
        await serves_bits_of(replica, published, 3)


async def test_verify_needs_the_token_from_elsewhere(published: PublishedRun) -> None:
    from stitch.replica.endpoints import is_loopback

    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback(None)
    assert not is_loopback("/run/socket")


async def test_verify_finds_weights_that_are_not_what_they_are_called(
    published: PublishedRun,
) -> None:
    async with replica_of(published) as replica:
        await replica.serves(3)
        replica.engine.weights.words_at(0)[0] ^= 1
        status, proof = await replica.post("/verify")
        assert (status, proof["equal"]) == (200, False)
        assert proof["digest"] != proof["board_digest"] == published.digests[3]
