"""`stitch compact`: once, again, and following a run until it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import DEADLINE_S, Program, Published, make_chain, publish, wait_for, words_of

from stitch.board import open_board


@pytest.fixture(scope="module")
def long_chain(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_chain(tmp_path_factory.mktemp("chain"), num_steps=9)


@pytest.fixture
def board(tmp_path: Path, long_chain: list[Path]) -> Published:
    publish(tmp_path / "board", long_chain, 1, 9)
    return Published(tmp_path / "board", long_chain)


def test_compact_writes_what_is_missing_and_says_so(
    stitch: Program, board: Published, tmp_path: Path
) -> None:
    chain_bytes = sum(row["bytes"] for row in stitch.ok("log", *board.args)["versions"][:-1])
    record = stitch.ok("compact", *board.args, "--threads", 1)
    assert {(row["from"], row["to"]) for row in record["written"]} == {(0, 4), (0, 8), (4, 8)}
    assert record["skipped"] == []
    assert 0 < record["bytes"] < chain_bytes
    again = stitch("compact", *board.args)
    assert (again.code, again.out) == (0, "0 merged patches written, 0 B\n")
    shown = stitch.ok("show", "8", *board.args)
    assert [row["from"] for row in shown["merged"]] == [4, 0]
    assert "merged from" in stitch("show", "8", *board.args).out
    assert stitch.ok("show", "7", *board.args)["merged"] == []
    for patch in (board.board / "math" / "v" / "00000003").glob("*.patch"):
        patch.unlink()  # the merged patches lead over it
    stitch.ok("checkout", "9", "--out", tmp_path / "out", *board.args)
    assert words_of(tmp_path / "out") == words_of(board.chain[9])


def test_what_cannot_be_merged_is_listed_with_the_reason(stitch: Program, board: Published) -> None:
    for patch in (board.board / "math" / "v" / "00000003").glob("*.patch"):
        patch.write_bytes(patch.read_bytes()[:-1])
    record = stitch.ok("compact", *board.args)
    assert {(row["from"], row["to"]) for row in record["skipped"]} == {(0, 4), (0, 8), (4, 8)}
    assert "v/00000003" in record["skipped"][0]["reason"]


def test_settings_of_compact_come_from_the_file_too(
    stitch: Program, board: Published, tmp_path: Path
) -> None:
    file = tmp_path / "stitch.toml"
    file.write_text('[compact]\ndecode = "changed"\n')
    assert len(stitch.ok("compact", *board.args, "--config", file)["written"]) == 3
    merged = open_board(board.board).open_run("math").merged(0, 8)
    assert merged is not None
    assert set(merged.stats.encodings) <= {"gaps", "absent"}


@pytest.mark.parametrize(
    ("failpoint", "spans_left"),
    [
        ("board.blob.temp", 0),
        ("merge.blob:2", 1),
        ("board.merged.temp", 0),
        ("board.merged.created", 1),
        ("merge.done:2", 2),
    ],
)
def test_killed_anywhere_it_leaves_whole_patches_and_the_next_one_goes_on(
    stitch: Program, board: Published, tmp_path: Path, failpoint: str, spans_left: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stitch.cli", "compact", *board.args, "--threads", "1"],
        env=os.environ | {"STITCH_FAILPOINT": failpoint},
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL
    run = open_board(board.board).open_run("math")
    assert len(run.merged_spans()) == spans_left
    stitch.ok("checkout", "9", "--out", tmp_path / "out", *board.args)
    assert words_of(tmp_path / "out") == words_of(board.chain[9])
    assert len(stitch.ok("compact", *board.args)["written"]) == 3 - spans_left
    assert len(run.merged_spans()) == 3


def test_following_goes_on_with_new_versions_until_it_is_stopped(
    tmp_path: Path, long_chain: list[Path]
) -> None:
    root = tmp_path / "board"
    publish(root, long_chain, 1, 5)
    command = [sys.executable, "-m", "stitch.cli", "compact", "--follow", "--interval-s", "0.05"]
    process = subprocess.Popen(
        [*command, "--board", str(root), "--threads", "1", "--json"],
        stdout=subprocess.PIPE,
        env=os.environ,
        text=True,
    )
    try:
        wait_for(root / "math/v/00000004/from-00000000.json")
        publish(root, long_chain, 6, 8)
        wait_for(root / "math/v/00000008/from-00000004.json")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert '"written": [{"from": 0, "to": 4' in out
