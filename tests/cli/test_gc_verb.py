"""`stitch gc` on a real board: it says, waits, deletes, and what is kept comes back bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import Program, Published, make_chain, words_of

from stitch.board import open_board
from stitch.cli import exits
from stitch.publish import Publisher
from stitch.tensors import open_checkpoint

APPLY = ("--apply", "--grace-s", 0)


@pytest.fixture(scope="module")
def long_chain(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_chain(tmp_path_factory.mktemp("chain"), num_steps=9)


@pytest.fixture
def board(tmp_path: Path, long_chain: list[Path], stitch: Program) -> Published:
    """Run `math` with versions 0 to 9 and its merged patches."""
    made = Published(tmp_path / "board", long_chain)
    with Publisher.start(made.board, "math", long_chain[0], threads=1) as publisher:
        for step, path in enumerate(long_chain[1:], start=1):
            with open_checkpoint(path) as checkpoint:
                publisher.publish(checkpoint, step=step).wait()
    stitch.ok("compact", *made.args, "--threads", 1)
    return made


def blobs(board: Published, version: int) -> list[str]:
    folder = board.board / "math" / "v" / f"{version:08d}"
    return sorted(path.name.split("-")[0] for path in folder.glob("*.patch"))


def comes_back(stitch: Program, board: Published, version: int, out: Path) -> None:
    stitch.ok("checkout", version, "--out", out, "--overwrite", *board.args)
    assert words_of(out) == words_of(board.chain[version])


def test_it_says_what_would_go_then_marks_then_deletes(
    stitch: Program, board: Published, tmp_path: Path
) -> None:
    gc = ("gc", *board.args, "--keep-versions", 2)
    before = sorted(board.board.rglob("*"))
    dry = stitch.ok(*gc)
    assert (dry["applied"], dry["first_kept"], dry["newest"]) == (False, 8, 9)
    assert dry["garbage"]["patches"]["objects"] == 8
    assert dry["garbage"]["merged patches"]["objects"] == 4
    assert "nothing was changed" in stitch(*gc).out
    assert sorted(board.board.rglob("*")) == before
    marked = stitch.ok(*gc, "--apply")
    assert (marked["marked"], marked["waiting"], marked["deleted"]) == (12, 12, 0)
    comes_back(stitch, board, 3, tmp_path / "out")  # still there
    done = stitch.ok(*gc, *APPLY)
    assert (done["marked"], done["deleted"], done["failed"]) == (0, 12, 0)
    assert done["deleted_bytes"] > 0
    assert [blobs(board, version) for version in (3, 8)] == [[], ["from"]]
    for version in (8, 9):
        comes_back(stitch, board, version, tmp_path / "out")
    assert stitch.ok("compact", *board.args)["written"] == []


def test_what_is_gone_is_said_everywhere(stitch: Program, board: Published, tmp_path: Path) -> None:
    stitch.ok("gc", *board.args, *APPLY, "--keep-versions", 2)
    rows = stitch.ok("log", *board.args)["versions"]
    assert [row["removed"] for row in rows] == [False] + [True] * 8 + [False]
    assert stitch("log", *board.args).out.count("patch removed") == 8
    shown = stitch.ok("show", 3, *board.args)
    assert (shown["patch_removed"], shown["merged"]) == (True, [])
    assert stitch.ok("show", 8, *board.args)["merged"][0]["from"] == 0
    line = stitch.fails(exits.USAGE, "checkout", 3, "--out", tmp_path / "out", *board.args)
    assert "version 3 of run 'math' was removed by retention" in line
    assert "from 8 on" in line


def test_a_publisher_resumes_and_goes_on_after_gc(
    stitch: Program, board: Published, tmp_path: Path
) -> None:
    stitch.ok("gc", *board.args, *APPLY, "--keep-versions", 1)
    with (
        Publisher.resume(board.board, "math", threads=1) as publisher,
        open_checkpoint(board.chain[4]) as checkpoint,
    ):
        assert publisher.publish(checkpoint).wait().version == 10
    stitch.ok("checkout", 10, "--out", tmp_path / "out", *board.args)
    assert words_of(tmp_path / "out") == words_of(board.chain[4])


def test_settings_come_from_the_file_and_named_versions_stay(
    stitch: Program, board: Published, tmp_path: Path
) -> None:
    file = tmp_path / "stitch.toml"
    file.write_text("[gc]\nkeep_versions = 1\nkeep = [5]\ngrace_s = 0\n")
    record = stitch.ok("gc", *board.args, "--config", file, "--apply")
    assert record["kept_besides"] == [5]
    assert record["deleted"] > 0
    comes_back(stitch, board, 5, tmp_path / "out")
    comes_back(stitch, board, 9, tmp_path / "out")
    again = stitch.ok("gc", *board.args, "--keep", "5", "--keep-versions", "1", *APPLY)
    assert again["deleted"] == 0
    assert "keep_versions must be at least 1" in stitch.fails(
        exits.USAGE, "gc", *board.args, "--keep-versions", 0
    )


@pytest.mark.parametrize(
    "failpoint",
    ["board.retention.temp", "gc.announced", "board.mark.created", "gc.marked", "gc.deleting",
     "gc.deleting:6", "gc.swept"],
)  # fmt: skip
def test_killed_anywhere_it_leaves_all_that_is_kept_and_the_next_one_ends_it(
    stitch: Program, board: Published, tmp_path: Path, failpoint: str
) -> None:
    command = ["gc", *board.args, "--keep-versions", "2", *map(str, APPLY)]
    done = subprocess.run(
        [sys.executable, "-m", "stitch.cli", *command],
        env=os.environ | {"STITCH_FAILPOINT": failpoint},
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    comes_back(stitch, board, 9, tmp_path / "out")
    stitch.ok(*command)
    assert stitch.ok(*command)["garbage"] == {}
    assert [blobs(board, version) for version in (3, 8)] == [[], ["from"]]
    assert open_board(board.board).open_run("math").newest() == 9
    comes_back(stitch, board, 8, tmp_path / "out")
    assert not list((board.board / "math" / "gc").iterdir())
