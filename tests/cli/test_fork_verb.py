"""`stitch fork`, and the verbs that read a fork's versions from what it was forked from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_kit import Program, Published, make_chain, words_of

from stitch.board import open_board
from stitch.publish import Publisher
from stitch.tensors import open_checkpoint
from stitch.types import VersionRef


@pytest.fixture(scope="module")
def short_chain(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_chain(tmp_path_factory.mktemp("chain"), num_steps=3)


@pytest.fixture
def board(tmp_path: Path, short_chain: list[Path]) -> Published:
    own = tmp_path / "base"
    shutil.copytree(short_chain[0], own)
    with Publisher.start(tmp_path / "board", "math", own, threads=1) as publisher:
        for step in (1, 2):
            with open_checkpoint(short_chain[step]) as checkpoint:
                publisher.publish(checkpoint, step=step).wait()
    return Published(tmp_path / "board", short_chain)


def where(board: Published, run: str) -> list[object]:
    return ["--board", board.board, "--run", run]


@pytest.mark.parametrize("has_base", [True, False])
def test_a_fork_is_made_published_into_and_checked_out(
    stitch: Program, board: Published, tmp_path: Path, has_base: bool
) -> None:
    made = stitch.ok("fork", "math@1", "hard", "--board", board.board)
    assert made["parent"] == {"run": "math", "version": 1}
    assert made["current"] is False
    opened = open_board(board.board)
    assert opened.open_run("hard").record.parent == VersionRef("math", 1)
    epoch = opened.current_epoch()
    assert epoch is not None
    assert epoch.run == "math"  # until something is published into the fork
    if not has_base:
        stitch.ok("anchor", "1", *where(board, "math"))
        shutil.rmtree(tmp_path / "base")
    stitch.ok("publish", board.chain[3], *where(board, "hard"))
    for version, chain in ((0, 1), (1, 3)):
        out = tmp_path / f"out-{version}"
        got = stitch.ok("checkout", version, "--out", out, *where(board, "hard"))
        assert words_of(out) == words_of(board.chain[chain])
        assert got["digest"] == opened.open_run("hard").digest(version)


def test_a_fork_may_store_its_weights_and_become_current(stitch: Program, board: Published) -> None:
    made = stitch.ok("fork", "math@2", "b", "--anchor", "--current", "--board", board.board)
    assert (made["anchor"], made["current"]) == (True, True)
    opened = open_board(board.board)
    assert opened.open_run("b").anchors() == [0]
    epoch = opened.current_epoch()
    assert epoch is not None
    assert epoch.run == "b"
    shown = stitch.ok("show", "0", "--board", board.board)
    assert shown["parent"] == {"run": "math", "version": 2}
    assert shown["digest_after"] == made["digest"]
    with Publisher.resume(board.board, "b", threads=1) as publisher:
        assert publisher.ref == VersionRef("b", 0)  # there is nobody to fence off


@pytest.mark.parametrize("version", ["math", "math@9", "no@1", "math@x"])
def test_what_cannot_be_forked_is_said_in_one_line(
    stitch: Program, board: Published, version: str
) -> None:
    stitch.fails(2, "fork", version, "b", "--board", board.board)
    stitch.fails(2, "fork", "math@1", "../b", "--board", board.board)
    stitch.fails(2, "fork", "math@1", "math", "--board", board.board)
