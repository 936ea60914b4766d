"""Replicas with trusted keys: what nobody trusted signed is refused by name, and never fetched."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from replica_kit import replica_of, until

from stitch.board import Board, keys, open_board
from stitch.board.stores.signed_store import Signing
from stitch.board.stores.signing import TrustedKeys, generate
from stitch.errors import UntrustedRecordError
from stitch.publish import Publisher
from stitch.testing.published import IMPATIENT, PublishedRun, copy_of, published_run
from stitch.testing.synthetic import adam_step
from stitch.types import ReplicaState, VersionRef


@pytest.fixture
def signed(tmp_path: Path) -> PublishedRun:
    """Three versions by a publisher whose key is in k, and the public one in k.pub."""
    signer = generate(tmp_path / "k", tmp_path / "k.pub")
    trusted = TrustedKeys.load([tmp_path / "k.pub"])
    store = open_board(tmp_path / "board").store
    board = Board(store, patience=IMPATIENT, signing=Signing(signer, trusted))
    return published_run(tmp_path, 3, board=board)


def go_on(published: PublishedRun, board: Board) -> VersionRef:
    weights = copy_of(published.weights[-1])
    adam_step(weights, 0.02, seed=9)
    with Publisher.resume(board, "r", published.base, threads=1) as publisher:
        return publisher.publish(weights).wait(60)


async def test_what_a_trusted_key_signed_is_served(signed: PublishedRun, tmp_path: Path) -> None:
    async with replica_of(signed, trusted_keys=(tmp_path / "k.pub",)) as replica:
        await replica.serves(3)
        await asyncio.to_thread(go_on, signed, signed.board)
        await replica.serves(4)
        assert replica.app.status.last_error == ""


async def test_an_unsigned_version_is_refused_by_name_and_not_fetched(
    signed: PublishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_of(signed, trusted_keys=(tmp_path / "k.pub",)) as replica:
        await replica.serves(3)
        read: list[int] = []
        real = type(signed.run).read_blob
        monkeypatch.setattr(
            type(signed.run),
            "read_blob",
            lambda run, version, ref: (read.append(version), real(run, version, ref))[1],
        )
        assert await asyncio.to_thread(go_on, signed, open_board(signed.board.url)) == VersionRef(
            "r", 4
        )
        read.clear()
        status = replica.app.status
        await until(lambda: "UntrustedRecordError" in status.blocked, "a refusal")
        assert status.state is ReplicaState.ERROR
        assert "version 4: " in status.blocked
        assert "not signed" in status.blocked
        code, body = await replica.complete()
        assert (code, body["weight_version_start"]) == (200, 3)
        code, body = await replica.complete(weight_version={"min_version": 4})
        assert (code, body["error"]["reason"]) == (409, "gap")
        assert "UntrustedRecordError" in body["error"]["message"]
        assert not read


async def test_a_replica_that_starts_beside_an_unsigned_version_serves_the_one_before(
    signed: PublishedRun, tmp_path: Path
) -> None:
    go_on(signed, open_board(signed.board.url))
    async with replica_of(signed, trusted_keys=(tmp_path / "k.pub",)) as replica:
        await replica.serves(3)
        await until(lambda: "UntrustedRecordError" in replica.app.status.last_error)
        assert replica.app.status.ready


async def test_a_run_that_nobody_trusted_began_ends_the_replica_by_name(
    signed: PublishedRun, tmp_path: Path
) -> None:
    generate(tmp_path / "o", tmp_path / "o.pub")
    async with replica_of(signed, run="r", trusted_keys=(tmp_path / "o.pub",)) as replica:
        assert isinstance(await replica.failure(), UntrustedRecordError)


async def test_an_unsigned_epoch_leads_nobody_to_another_run(
    signed: PublishedRun, tmp_path: Path
) -> None:
    plain = open_board(signed.board.url)
    async with replica_of(signed, trusted_keys=(tmp_path / "k.pub",)) as replica:
        await replica.serves(3)
        with await asyncio.to_thread(Publisher.start, plain, "evil", signed.base, threads=1):
            assert plain.current_epoch().run == "evil"  # type: ignore[union-attr]
            polls = replica.app.metrics.polls
            before = polls.value("ok")
            await until(lambda: polls.value("ok") > before + 12)
            await replica.post("/wake")
            assert replica.app.status.ref == VersionRef("r", 3)
    assert plain.signed_by(keys.run_record("evil")) is None
