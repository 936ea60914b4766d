"""The log of a run: publishing, conflicts, gaps, and finding the newest version."""

from __future__ import annotations

from board_kit import new_run, publish, publish_through

from stitch.board import Board


def test_a_published_version_is_read_back_by_another_opener(board: Board) -> None:
    run = new_run(board)
    published = publish(run, 1, b"the patch")
    other = board.open_run("math")
    assert other.newest() == 1
    assert other.manifest(1) == published
    assert other.read_blob(1, published.blobs[0]) == b"the patch"
    assert other.schema == run.schema
    assert board.runs() == ["math"]


def test_newest_finds_the_end_with_and_without_a_head(board: Board) -> None:
    run = new_run(board)
    publish_through(run, 23)
    assert board.open_run("math").newest() == 23
    run.write_head(23)
    assert board.open_run("math").newest() == 23
    assert board.open_run("math").newest(after=20) == 23
