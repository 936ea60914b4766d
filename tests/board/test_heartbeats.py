"""Heartbeats: the last one of each replica, whatever else lies in their folder."""

from __future__ import annotations

import logging

import pytest
from board_kit import heartbeat, new_run

from stitch.board import Board, keys
from stitch.errors import CorruptRecordError, UsageError


def test_the_last_beat_of_each_replica_is_listed(board: Board) -> None:
    run = new_run(board)
    assert run.heartbeats() == []
    for seq in range(3):
        for replica in ("r2", "r1"):
            run.put_heartbeat(heartbeat(replica, seq=seq))
    assert board.open_run("math").heartbeats() == [
        heartbeat("r1", seq=2),
        heartbeat("r2", seq=2),
    ]
    run.delete_heartbeat("r1")
    run.delete_heartbeat("r1")
    assert [beat.replica for beat in run.heartbeats()] == ["r2"]


@pytest.mark.parametrize("data", [b"", b"\0" * 50, b"garbage", b'{"format":2}', b"x" * 2**21])
def test_beats_that_cannot_be_read_are_left_out_and_logged(
    board: Board, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(board)
    run.put_heartbeat(heartbeat("r1"))
    board.store.put(keys.heartbeat("math", "r2"), data, mode="overwrite")
    board.store.put(keys.heartbeat("math", "r3"), heartbeat("r1").to_json_bytes(), mode="overwrite")
    with caplog.at_level(logging.WARNING, logger="stitch.board"):
        assert [beat.replica for beat in run.heartbeats()] == ["r1"]
    assert "replicas/r2.json" in caplog.text
    assert "replicas/r3.json" in caplog.text


def test_a_beat_that_could_not_be_read_back_is_not_written(board: Board) -> None:
    run = new_run(board)
    with pytest.raises(UsageError):
        run.put_heartbeat(heartbeat("../r1"))
    with pytest.raises(CorruptRecordError, match=r"replicas/r1\.json: field seq"):
        run.put_heartbeat(heartbeat("r1", seq=-1))
    with pytest.raises(CorruptRecordError, match="versions"):
        run.put_heartbeat(heartbeat("r1", versions=({"version": 1},) * 33))
    assert run.heartbeats() == []


@pytest.mark.parametrize(
    "url", ["", "javascript:1", "http://u:p@h", "http://h\nX: y", "http://h:0"]
)
def test_a_beat_whose_address_is_no_plain_one_is_neither_written_nor_read(
    board: Board, url: str
) -> None:
    run = new_run(board)
    beat = heartbeat("r1", url=url)
    with pytest.raises(CorruptRecordError, match="field url"):
        run.put_heartbeat(beat)
    board.store.put(keys.heartbeat("math", "r1"), beat.to_json_bytes(), mode="overwrite")
    assert run.heartbeats() == []
