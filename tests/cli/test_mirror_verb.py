"""`stitch mirror`: once, again, conflicting, and continuously until it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import DEADLINE_S, Program, Published, make_chain, publish, wait_for, words_of


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_chain(tmp_path_factory.mktemp("chain"), num_steps=6)


@pytest.fixture
def source(tmp_path: Path, chain: list[Path]) -> Published:
    publish(tmp_path / "source", chain, 1, 4)
    return Published(tmp_path / "source", chain)


def test_a_mirrored_board_serves_by_itself(
    stitch: Program, source: Published, tmp_path: Path
) -> None:
    stitch.ok("anchor", "4", *source.args)
    target = tmp_path / "target"
    newest = stitch.ok("log", *source.args)["versions"][0]["version"]
    record = stitch.ok("mirror", source.board, target, "--once", "--scratch", tmp_path / "scratch")
    assert record["newest"] == {"math": newest}
    assert (record["versions"], record["anchors"]) == (newest, 1)
    assert record["bytes"] > 0
    source.board.rename(tmp_path / "gone")
    stitch.ok("checkout", "4", "--out", tmp_path / "out", "--board", target)
    assert words_of(tmp_path / "out") == words_of(source.chain[4])
    (tmp_path / "gone").rename(source.board)
    again = stitch("mirror", source.board, target, "--once")
    assert again.code == 0
    assert again.out == (
        f"math is at version {newest}\n0 versions, 0 merged patches and 0 anchors copied, 0 B\n"
    )


def test_what_cannot_be_mirrored_is_said_in_one_line(
    stitch: Program, source: Published, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    assert "there is no directory" in stitch.fails(2, "mirror", tmp_path / "none", target)
    assert "to itself" in stitch.fails(2, "mirror", source.board, source.board, "--once")
    assert "has no run 'mth'" in stitch.fails(
        2, "mirror", source.board, target, "--once", "--run", "mth"
    )
    stitch.ok("mirror", source.board, target, "--once")
    publish(target, source.chain, 5, 5)
    publish(source.board, source.chain, 6, 6)
    line = stitch.fails(2, "mirror", source.board, target)
    assert "nothing was overwritten" in line or "somebody else publishes there" in line


def test_following_goes_on_with_new_versions_until_it_is_stopped(
    source: Published, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    command = [sys.executable, "-m", "stitch.cli", "mirror", str(source.board), str(target)]
    process = subprocess.Popen(
        [*command, "--interval-s", "0.05", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ,
        text=True,
    )
    try:
        wait_for(target / "epochs/00000001.json")
        publish(source.board, source.chain, 5, 6)
        wait_for(target / "math/v/00000006/manifest.json")
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, log
    assert json.loads(out)["newest"]["math"] >= 6
    assert "event=copied run=math version=6" in log
