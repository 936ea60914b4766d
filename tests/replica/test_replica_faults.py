"""What goes wrong, and what is served meanwhile: never another version than the label says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from replica_kit import engine_at, hold_commits, replica_of, served, until
from test_replica_life import publish_more, serves_bits_of

from stitch.errors import BaseMismatchError, FatalReplicaError
from stitch.publish import write_anchor
from stitch.tensors import write_safetensors
from stitch.testing.published import PublishedRun, copy_of, digest_of, published_run
from stitch.testing.synthetic import adam_step
from stitch.types import ReplicaState, VersionRef


def flip(path: Path, offset: int = 40) -> bytes:
    """Flip a bit in a file; returns what it was."""
    was = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(was[:offset] + bytes([was[offset] ^ 1]) + was[offset + 1 :])
    return was


async def test_a_bad_blob_stops_it_before_and_it_says_which_and_why(
    published: PublishedRun,
) -> None:
    was = flip(published.blob_path(2))
    async with replica_of(published, max_lag=1) as replica:
        await serves_bits_of(replica, published, 1)
        status, health = await replica.get("/health")
        assert status == 503
        assert health["reason"].startswith("2 versions behind: version 2: CorruptBlobError")
        _, answer = await replica.complete(weight_version={"min_version": 2})
        assert answer["error"]["reason"] == "gap"
        status, answer = await replica.complete(weight_version={"min_version": 1})
        assert (status, answer["weight_version_start"]) == (200, 1)
        published.blob_path(2).write_bytes(was)
        await serves_bits_of(replica, published, 3)
        assert replica.app.status.ready
        assert replica.app.status.blocked == ""


async def test_a_bad_version_within_the_lag_policy_leaves_the_old_one_in_service(
    published: PublishedRun,
) -> None:
    flip(published.blob_path(3))
    async with replica_of(published) as replica:
        await serves_bits_of(replica, published, 2)
        await until(lambda: replica.app.status.state is ReplicaState.ERROR)
        assert (await replica.get("/health"))[0] == 200
        _, info = await replica.get("/server_info")
        assert "version 3" in info["blocked"]
        assert "CorruptBlobError" in info["blocked"]


async def test_an_anchor_beyond_a_bad_version_is_jumped_to_and_nothing_between_is_applied(
    published: PublishedRun,
) -> None:
    flip(published.blob_path(2))
    async with replica_of(published) as replica:
        await serves_bits_of(replica, published, 1)
        await asyncio.to_thread(write_anchor, published.run, published.weights[3], 3)
        await serves_bits_of(replica, published, 3)
        assert [(c.from_version, c.version) for c in replica.app.status.commits] == [(0, 1), (1, 3)]


async def test_an_unusable_scratch_directory_does_not_end_a_replica_that_serves(
    published: PublishedRun, tmp_path: Path
) -> None:
    flip(published.blob_path(3))
    scratch = tmp_path / "scratch"
    async with replica_of(published, scratch=scratch) as replica:
        await serves_bits_of(replica, published, 2)
        scratch.write_text("not a directory")
        await asyncio.to_thread(write_anchor, published.run, published.weights[3], 3)
        await until(lambda: "scratch" in replica.app.status.last_error, "the anchor's fault")
        assert (await replica.complete(weight_version={"exact_version": 2}))[0] == 200
        scratch.unlink()
        await serves_bits_of(replica, published, 3)


async def test_the_verdict_on_a_bad_version_survives_a_restart(published: PublishedRun) -> None:
    flip(published.blob_path(3))
    for _ in range(2):
        async with replica_of(published) as replica:
            await serves_bits_of(replica, published, 2)
            await until(lambda r=replica: "version 3" in r.app.status.blocked)


async def test_a_broken_manifest_stops_it_before(published: PublishedRun) -> None:
    path = published.manifest_path(2)
    path.chmod(0o644)
    was = path.read_bytes()
    path.write_bytes(was[:50])
    async with replica_of(published) as replica:
        await serves_bits_of(replica, published, 1)
        await until(lambda: replica.app.status.blocked.startswith("version 2: "))
        assert "v/00000002/manifest.json" in replica.app.status.blocked
        path.write_bytes(was)
        await serves_bits_of(replica, published, 3)


async def test_a_broken_newest_manifest_is_not_served_until_it_is_whole(
    published: PublishedRun,
) -> None:
    path = published.manifest_path(3)
    path.chmod(0o644)
    was = path.read_bytes()
    path.write_bytes(was[:50])
    async with replica_of(published) as replica:
        await serves_bits_of(replica, published, 2)
        path.write_bytes(was)
        await serves_bits_of(replica, published, 3)


@pytest.mark.parametrize("verb", ["stage", "commit"])
async def test_a_failed_transaction_is_undone_and_tried_again(
    published: PublishedRun, verb: str
) -> None:
    engine = engine_at(published, 0)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        status, told = replica.app.status, []
        status.listeners.append(lambda: told.append((status.state, status.last_error)))
        setattr(engine.faults, f"{verb}_failures", 2)
        await asyncio.to_thread(publish_more, published, 1)
        await serves_bits_of(replica, published, 4)
        errors = [error for state, error in told if state is ReplicaState.ERROR]
        assert len(errors) == 2
        assert all("EngineError" in error for error in errors)
        assert not replica.app.gate.is_closed


async def test_while_the_engine_refuses_a_version_the_old_one_is_served(
    published: PublishedRun,
) -> None:
    engine = engine_at(published, 0)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        engine.faults.commit_failures = 10**6
        await asyncio.to_thread(publish_more, published, 1)
        await until(lambda: replica.app.metrics.commits.value("failed") >= 2)
        status, body = await replica.complete()
        assert (status, body["weight_version_start"]) == (200, 3)
        assert digest_of(engine.weights) == published.digests[3]
        engine.faults.commit_failures = 0
        await serves_bits_of(replica, published, 4)


async def test_a_commit_whose_reply_is_lost_is_found_to_have_happened(
    published: PublishedRun,
) -> None:
    engine = engine_at(published, 0)
    engine.faults.lose_reply.add("commit")
    async with replica_of(published, engine) as replica:
        await serves_bits_of(replica, published, 3)
        assert len(replica.app.status.commits) == 1


async def test_a_commit_that_never_reached_the_engine_is_found_not_to_have_happened(
    published: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_at(published, 0)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        lost = hold_commits(replica, monkeypatch)
        await asyncio.to_thread(publish_more, published, 1)
        await until(lambda: replica.app.gate.is_closed)
        lost.set()
        await serves_bits_of(replica, published, 4)
        assert "did not happen" in replica.app.status.last_error


async def test_an_engine_whose_undo_fails_ends_the_replica(published: PublishedRun) -> None:
    engine = engine_at(published, 0)
    async with replica_of(published, engine, commit_resolve_s=0.5) as replica:
        await replica.serves(3)
        engine.faults.commit_failures, engine.faults.undo_fails = 1, True
        await asyncio.to_thread(publish_more, published, 1)
        assert isinstance(await replica.failure(), FatalReplicaError)
        (beat,) = published.run.heartbeats()
        assert beat.state is ReplicaState.FAILED
        assert not beat.ready
        assert "FatalReplicaError" in beat.reason


async def test_an_engine_that_dies_ends_the_replica_within_its_budget(
    published: PublishedRun,
) -> None:
    engine = engine_at(published, 0)
    async with replica_of(published, engine, engine_down_budget_s=0.5) as replica:
        await replica.serves(3)
        engine.die()
        status, body = await replica.complete()
        assert (status, body["error"]["type"]) == (502, "EngineUnreachableError")
        await until(lambda: not replica.app.status.ready)
        assert "has not answered" in str(await replica.failure())


async def test_an_engine_that_is_silent_for_a_while_is_not_ready_and_then_is_again(
    published: PublishedRun,
) -> None:
    engine = engine_at(published, 0)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        engine.dead = True
        await until(lambda: not replica.app.status.ready)
        assert (await replica.get("/health"))[0] == 503
        assert (await replica.get("/live"))[0] == 200
        engine.dead = False
        await until(lambda: replica.app.status.ready)
        await serves_bits_of(replica, published, 3)


async def test_a_long_commit_is_not_taken_for_a_failure(published: PublishedRun) -> None:
    engine = engine_at(published, 0)
    engine.faults.hang.add("commit")
    async with replica_of(published, engine, engine_down_budget_s=0.1) as replica:
        await until(lambda: replica.app.gate.is_closed)
        for _ in range(30):
            assert (await replica.get("/live"))[0] == 200
        engine.faults.hang.clear()
        engine.faults.release.set()
        await serves_bits_of(replica, published, 3)


def other_weights(published: PublishedRun, directory: Path) -> tuple[Path, object]:
    """A checkpoint with the run's tensors and other values."""
    weights = copy_of(published.weights[0])
    adam_step(weights, 0.1, seed=999)
    write_safetensors(directory / "other.safetensors", weights)
    return directory / "other.safetensors", weights


async def test_an_engine_with_another_base_is_refused_with_the_next_step(
    published: PublishedRun, tmp_path: Path
) -> None:
    model, weights = other_weights(published, tmp_path)
    engine = engine_at(published, 0)
    engine.weights = weights
    async with replica_of(published, engine, model=model) as replica:
        error = await replica.failure()
    assert isinstance(error, FatalReplicaError)
    assert isinstance(error.__cause__, BaseMismatchError)
    for part in (
        published.digests[0],
        digest_of(weights),
        "anchor",
        str(published.run.record.base),
    ):
        assert part in str(error)
    assert engine.ref is None


async def test_an_engine_with_another_base_enters_by_an_anchor(
    published: PublishedRun, tmp_path: Path
) -> None:
    model, weights = other_weights(published, tmp_path)
    write_anchor(published.run, published.weights[2], 2)
    engine = engine_at(published, 0)
    engine.weights = weights
    async with replica_of(published, engine, model=model) as replica:
        await serves_bits_of(replica, published, 3)


async def test_an_engine_that_does_not_hold_what_its_checkpoint_does_is_refused(
    published: PublishedRun,
) -> None:
    write_anchor(published.run, published.weights[2], 2)
    engine = engine_at(published, 0)
    engine.weights.words_at(0)[3] ^= 1
    async with replica_of(published, engine) as replica:
        assert "restart it" in str(await replica.failure())


async def test_an_engine_with_other_tensors_is_refused(
    published: PublishedRun, tmp_path: Path
) -> None:
    other = published_run(tmp_path / "other", 0, hidden=16)
    async with replica_of(published, engine_at(other, 0), model=other.base) as replica:
        error = await replica.failure()
    assert published.run.schema.digest in str(error)


async def test_a_label_that_the_weights_do_not_bear_out_is_refused(
    published: PublishedRun,
) -> None:
    engine = engine_at(published, 0)
    engine._ref = VersionRef("r", 2)
    async with replica_of(published, engine) as replica:
        assert isinstance(await replica.failure(), FatalReplicaError)


async def test_a_wrong_control_token_is_said_to_be_one(published: PublishedRun) -> None:
    async with replica_of(published) as replica:
        await replica.serves(3)
    engine = engine_at(published, 0)
    async with served(engine) as url:
        from stitch.engines.control import ControlClient
        from stitch.errors import UsageError

        client = ControlClient(url, "another token, wrong", schema=published.run.schema)
        with pytest.raises(UsageError, match="token"):
            await client.describe()
        await client.close()
