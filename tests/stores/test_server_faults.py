"""Servers behind a proxy that loses, delays, cuts and refuses: what is published stays right."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from board_kit import manifest, new_run, publish
from store_kit import OpenBoard
from store_servers import Server

from stitch.board import Board, Run
from stitch.board.transfers.transfer import PIECE_BYTES
from stitch.errors import (
    CorruptBlobError,
    PublishConflictError,
    StoreError,
    StoreFullError,
    StoreUnsuitableError,
)
from stitch.testing.fault_proxy import FaultProxy

SPREAD = random.Random(7).randbytes(3 * PIECE_BYTES + 1234)
"""A blob that is fetched in four pieces."""


@pytest.fixture
def board(server: Server, proxy: FaultProxy, open_on: OpenBoard) -> Board:
    """A fresh board behind the proxy."""
    return open_on(server, port=proxy.port)


@pytest.fixture
def run(board: Board) -> Run:
    """A run with one version; the store has been probed."""
    run = new_run(board)
    publish(run, 1, SPREAD)
    return run


def reread(run: Run) -> Run:
    """The run as a reader sees it that knows nothing yet."""
    return run.board.open_run(run.name)


# --- writing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["manifest.json", ".patch"])
def test_a_write_whose_reply_is_lost_is_recognised_as_ones_own(
    run: Run, proxy: FaultProxy, what: str
) -> None:
    fault = proxy.lose_reply(what, methods=("PUT",))
    published = publish(run, 2)
    assert fault.num_hits == 1
    assert reread(run).manifest(2) == published
    assert reread(run).newest() == 2


def test_a_lost_reply_does_not_turn_a_lost_race_into_a_win(run: Run, proxy: FaultProxy) -> None:
    other = reread(run)
    publish(run, 2, writer="first")
    proxy.lose_reply("manifest.json", methods=("PUT",))
    with pytest.raises(PublishConflictError, match="first"):
        publish(other, 2, writer="second")


@pytest.mark.parametrize(
    ("status", "code"),
    [(409, "ConditionalRequestConflict"), (409, "OperationAborted"), (412, "PreconditionFailed")],
)
def test_a_passing_conflict_is_no_phantom_version(
    run: Run, proxy: FaultProxy, status: int, code: str
) -> None:
    fault = proxy.answer(status, "manifest.json", code=code, methods=("PUT",))
    published = publish(run, 2)
    assert fault.num_hits == 1
    assert reread(run).manifest(2) == published


@pytest.mark.parametrize(
    ("status", "code"),
    [(429, "TooManyRequests"), (500, "InternalError"), (503, "SlowDown")],
)
@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_passing_refusals_are_waited_out(
    run: Run, proxy: FaultProxy, status: int, code: str, method: str
) -> None:
    fault = proxy.answer(status, code=code, methods=(method,), times=2)
    published = publish(run, 2)
    reader = reread(run)
    assert reader.manifest(2) == published
    assert reader.read_blob(2, published.blobs[0]) == b"patch 2"
    assert fault.num_hits == 2


def test_a_store_that_keeps_refusing_ends_in_a_retryable_error(run: Run, proxy: FaultProxy) -> None:
    proxy.answer(503, code="SlowDown", methods=("GET",), times=None)
    with pytest.raises(StoreError, match=r"HTTP status 503, SlowDown"):
        run.board.store.get("math/head.json", max_bytes=100)


@pytest.mark.parametrize("match", ["manifest.json", ".patch"])
def test_a_full_store_keeps_what_is_published_and_recovers(
    run: Run, proxy: FaultProxy, match: str
) -> None:
    proxy.answer(507, match, code="InsufficientStorage", methods=("PUT",), times=None)
    with pytest.raises(StoreFullError):
        publish(run, 2)
    assert reread(run).newest() == 1
    proxy.heal()
    publish(run, 2)
    assert reread(run).newest() == 2


def test_dropped_connections_are_made_anew(run: Run, proxy: FaultProxy) -> None:
    proxy.drop(times=2)
    proxy.drop("manifest.json", methods=("PUT",))
    publish(run, 2)
    assert reread(run).newest() == 2


# --- reading -----------------------------------------------------------------------------------


def test_bodies_that_break_off_are_fetched_again(run: Run, proxy: FaultProxy) -> None:
    fault = proxy.cut(".patch", keep=1000, times=3, after=1)
    assert run.read_blob(1, run.manifest(1).blobs[0]) == SPREAD
    assert fault.num_hits == 3


def test_a_short_answer_that_calls_itself_whole_is_asked_for_again(
    run: Run, proxy: FaultProxy
) -> None:
    fault = proxy.change(".patch", lambda body: body[:-1], times=2, after=1)
    assert run.read_blob(1, run.manifest(1).blobs[0]) == SPREAD
    assert fault.num_hits == 2


@pytest.mark.parametrize("change", [lambda body: body[:50], lambda body: bytes(len(body))])
def test_what_stays_short_or_wrong_is_never_taken(
    run: Run, proxy: FaultProxy, change: Callable[[bytes], bytes]
) -> None:
    proxy.change(".patch", change, times=None)
    with pytest.raises((CorruptBlobError, StoreError)):
        run.read_blob(1, run.manifest(1).blobs[0])
    proxy.heal()
    assert run.read_blob(1, run.manifest(1).blobs[0]) == SPREAD


def test_a_stalled_body_is_given_up_and_fetched_again(
    run: Run, server: Server, proxy: FaultProxy, open_on: OpenBoard
) -> None:
    prefix = run.board.url.rsplit("/", 1)[-1]
    hasty = open_on(server, prefix, port=proxy.port, options="&timeout_s=1").open_run("math")
    fault = proxy.stall(".patch", keep=10)
    assert hasty.read_blob(1, hasty.manifest(1).blobs[0]) == SPREAD
    assert fault.num_hits == 1


def test_slow_bodies_arrive(run: Run, proxy: FaultProxy) -> None:
    proxy.trickle(".patch", piece_bytes=PIECE_BYTES // 20, pause_s=0.01, times=None)
    assert run.read_blob(1, run.manifest(1).blobs[0]) == SPREAD


def test_what_is_not_visible_yet_is_waited_for(run: Run, proxy: FaultProxy) -> None:
    """The manifest of version 2 shows before its blob, and version 3 before version 2."""
    published = publish(run, 2, SPREAD)
    blob = proxy.hide(published.blobs[0].name, times=2)
    assert reread(run).read_blob(2, published.blobs[0]) == SPREAD
    assert blob.num_hits == 2
    publish(run, 3)
    run.write_head(3)
    late = proxy.hide("v/00000002/manifest.json", times=1)
    reader = reread(run)
    assert reader.newest() in (1, 3)  # never a version whose predecessor did not show
    assert late.num_hits == 1
    assert reader.newest() == 3
    assert reader.manifest(2) == published


def test_stale_lists_hide_no_version(run: Run, proxy: FaultProxy) -> None:
    fault = proxy.stale_lists()
    assert run.board.runs() == ["math"]
    new_run(run.board, "later")
    publish(run, 2)
    assert run.board.runs() == ["math"]  # the list is as old as that
    assert reread(run).newest() == 2
    assert run.board.open_run("later").newest() == 0
    assert fault.num_hits > 1


@pytest.mark.parametrize("offset_s", [-3600.0, 3600.0, 90 * 86400.0])
def test_no_decision_rests_on_the_stores_clock(
    run: Run, proxy: FaultProxy, offset_s: float
) -> None:
    proxy.set_clock(offset_s)
    run.board.begin_epoch("math", "w")
    publish(run, 2)
    run.board.begin_epoch("math", "w2")
    epoch = run.board.current_epoch()
    assert epoch is not None
    assert epoch.writer == "w2"
    assert reread(run).newest() == 2


# --- who may not be trusted, and who is not let in -----------------------------------------------


def test_a_store_that_ignores_the_condition_is_refused(
    seaweedfs: Server, open_on: OpenBoard
) -> None:
    with FaultProxy(seaweedfs.endpoint) as proxy:
        board = open_on(seaweedfs, port=proxy.port, unsigned=True)
        board.check_store()  # as it is, it is good
        proxy.ignore_conditions()
        board = open_on(seaweedfs, port=proxy.port, unsigned=True)
        with pytest.raises(StoreUnsuitableError, match="does not keep create-if-absent"):
            new_run(board)
        with pytest.raises(StoreUnsuitableError, match="does not keep create-if-absent"):
            board.begin_epoch("math", "w")
        assert board.runs() == []


def test_a_part_that_the_store_lost_is_noticed_and_sent_again(
    seaweedfs: Server, open_on: OpenBoard
) -> None:
    with FaultProxy(seaweedfs.endpoint) as proxy:
        run = new_run(open_on(seaweedfs, port=proxy.port, unsigned=True))
        data = random.Random(3).randbytes(20 * 2**20)
        fault = proxy.change_upload("partNumber=2", lambda body: bytes(len(body)))
        with pytest.raises(StoreError, match=r"w-0\.patch: of the 3 parts .* number 1;"):
            run.put_blob(1, "w-0.patch", data)
        assert fault.num_hits == 1
        ref = run.put_blob(1, "w-0.patch", data)
        run.commit(manifest(run, 1, (ref,)))
        assert run.read_blob(1, ref) == data


def test_a_lost_reply_to_the_end_of_a_large_upload_is_recognised(
    run: Run, proxy: FaultProxy
) -> None:
    data = random.Random(4).randbytes(20 * 2**20)
    fault = proxy.lose_reply("uploadId=", methods=("POST",))
    other = proxy.lose_reply("comp=blocklist", methods=("PUT",))
    ref = run.put_blob(2, "w-0.patch", data)
    assert fault.num_hits + other.num_hits == 1
    assert run.read_blob(2, ref) == data
