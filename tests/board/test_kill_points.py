"""A writer killed at each durable step: the board is old or new, and the next writer goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from board_kit import NO_WAITS, new_run, publish, publish_through

from stitch.board import Board, open_board, plan_route
from stitch.board.keys import TEMPORARY_FOLDER
from stitch.errors import RunNotFoundError

HERE = Path(__file__).parent


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A board whose run `math` has versions 1 and 2, and beside it a checkpoint `weights`."""
    run = new_run(open_board(tmp_path / "board"))
    publish_through(run, 2)
    run.write_head(2)
    run.board.begin_epoch("math", "first")
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "board"


def kill_at(failpoint: str, root: Path, what: str) -> None:
    """Let another process do `what` and die at the failpoint."""
    done = subprocess.run(
        [sys.executable, str(HERE / "publish_steps.py"), str(root), what],
        env={**os.environ, "STITCH_FAILPOINT": failpoint},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, f"{failpoint} was not reached: {done.stderr}"


def check_whole(board: Board) -> int:
    """Everything that is published can be read and reached; returns the newest version."""
    run = board.open_run("math")
    newest = run.newest()
    for manifest in run.manifests(1, newest + 1):
        for ref in manifest.blobs:
            assert run.read_blob(manifest.version, ref)
    assert [step.to_version for step in plan_route(run, 0, newest).steps] == list(
        range(1, newest + 1)
    )
    for version in run.anchors():
        assert run.anchor(version) is not None
    return newest


OLD = ["board.blob.temp", "board.blob.created", "board.blob.done", "board.manifest.temp"]
NEW = ["board.manifest.created", "board.head", "board.head.temp", "board.head.created"]


@pytest.mark.parametrize("failpoint", OLD + NEW)
def test_a_publisher_killed_anywhere_leaves_the_old_or_the_new_version(
    root: Path, failpoint: str
) -> None:
    kill_at(failpoint, root, "publish")
    board = open_board(root, patience=NO_WAITS)
    newest = check_whole(board)
    assert newest == (2 if failpoint in OLD else 3)
    run = board.open_run("math")
    if newest == 3:
        assert run.manifest(3).writer == "killed"
    published = publish(run, newest + 1, b"the next writer's patch", writer="next")
    run.write_head(newest + 1)
    reader = open_board(root).open_run("math")
    assert reader.newest() == newest + 1
    assert reader.manifest(newest + 1) == published
    assert check_whole(board) == newest + 1


@pytest.mark.parametrize("failpoint", ["board.blob.temp", "board.manifest.temp"])
def test_what_a_killed_writer_left_is_invisible_and_can_be_swept(
    root: Path, failpoint: str
) -> None:
    kill_at(failpoint, root, "publish")
    left = list((root / TEMPORARY_FOLDER).iterdir())
    assert len(left) == 1
    board = open_board(root)
    assert board.runs() == ["math"]
    assert board.sweep_temporaries(older_than_s=0) == 1
    assert check_whole(board) == 2


@pytest.mark.parametrize("kind", ["blob", "schema", "run"])
@pytest.mark.parametrize("place", ["temp", "created"])
def test_a_run_killed_while_it_is_created_exists_whole_or_not_at_all(
    root: Path, kind: str, place: str
) -> None:
    kill_at(f"board.{kind}.{place}", root, "run")
    board = open_board(root, patience=NO_WAITS)
    if (kind, place) == ("run", "created"):
        assert board.runs() == ["math", "new"]
        run = board.open_run("new")
    else:
        assert board.runs() == ["math"]
        with pytest.raises(RunNotFoundError):
            board.open_run("new")
        run = new_run(board, "new")
    assert run.schema.num_bytes == run.record.num_bytes
    publish(run, 1)
    assert board.open_run("new").newest() == 1


@pytest.mark.parametrize("place", ["temp", "created"])
def test_an_epoch_killed_while_it_begins_began_or_did_not(root: Path, place: str) -> None:
    kill_at(f"board.epoch.{place}", root, "epoch")
    board = open_board(root, patience=NO_WAITS)
    current = board.current_epoch()
    assert current is not None
    assert current.writer == ("first" if place == "temp" else "killed")
    assert board.begin_epoch("math", "next").epoch == current.epoch + 1


@pytest.mark.parametrize(
    "failpoint",
    ["board.blob.temp", "board.blob.created", "board.anchor.temp", "board.anchor.created"],
)
def test_an_anchor_killed_while_it_is_written_is_there_or_not(root: Path, failpoint: str) -> None:
    kill_at(failpoint, root, "anchor")
    board = open_board(root, patience=NO_WAITS)
    run = board.open_run("math")
    assert run.anchors() == ([2] if failpoint == "board.anchor.created" else [])
    record = run.write_anchor(2, root.parent / "weights", writer="next")
    assert record.writer == ("killed" if failpoint == "board.anchor.created" else "next")
    fetched = run.fetch_anchor(record, root.parent / "out")
    assert (fetched / "model.safetensors").read_bytes() == b"weights"
    assert check_whole(board) == 2
