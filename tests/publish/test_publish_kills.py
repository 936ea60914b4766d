"""A publisher killed at any durable step: readers find old or new, and the run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import publish_child
import pytest
from publish_child import trained
from publish_helpers import DEADLINE_S, read_version

from stitch.publish import Publisher
from stitch.tensors import write_safetensors
from stitch.testing.published import NO_RETRIES, digest_of, quick_board
from stitch.types import VersionRef

NUM_VERSIONS = 3

KILLS = [
    "publish.snapshot:1",
    "publish.encoded:2",
    "publish.blob:2",
    "publish.before_manifest:2",
    "publish.after_manifest:2",
    "publish.head:2",
    "board.blob.temp:2",
    "board.blob.created:2",
    "board.blob.done:2",
    "board.manifest.temp:2",
    "board.manifest.created:1",
    "board.manifest.created:2",
    "board.head:2",
    "board.anchor.temp:1",
    "board.anchor.created:1",
    "tensors.file.written:1",
    "tensors.file.renamed:1",
]

STARTS = [
    "board.schema.created:1",
    "board.run.temp:1",
    "board.run.created:1",
    "board.epoch.created:1",
]


@cache
def digest_at(version: int) -> str:
    return digest_of(trained(version))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.safetensors"
    write_safetensors(path, trained(0))
    return path


def run_child(board: Path, base: Path, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, publish_child.__file__, str(board), str(base), str(NUM_VERSIONS)]
    environment = os.environ | {"STITCH_FAILPOINT": failpoint}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def assert_everything_is_right(board_path: Path, base: Path, newest: int) -> None:
    run = quick_board(board_path).open_run("r")
    assert run.newest() == newest
    for version in range(newest + 1):
        assert run.digest(version) == digest_at(version)
        mirror = read_version(run, base, version)
        assert digest_of(mirror.weights) == digest_at(version)


@pytest.mark.parametrize("failpoint", KILLS)
def test_a_publisher_killed_at_any_step_leaves_old_or_new(
    tmp_path: Path, base: Path, failpoint: str
) -> None:
    board = tmp_path / "board"
    killed = run_child(board, base, failpoint)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    told = killed.stdout.count("published")
    newest = quick_board(board).open_run("r").newest()
    assert newest in (told, told + 1)  # nothing lost, nothing invented
    assert_everything_is_right(board, base, newest)

    with Publisher.resume(quick_board(board), "r", base, threads=1, retry=NO_RETRIES) as publisher:
        assert publisher.ref == VersionRef("r", newest)
        assert publisher.digest == digest_at(newest)
        next_one = publisher.publish(trained(newest + 1), step=newest + 1)
        assert next_one.wait(DEADLINE_S) == VersionRef("r", newest + 1)
    assert_everything_is_right(board, base, newest + 1)


@pytest.mark.parametrize("failpoint", STARTS)
def test_a_start_killed_at_any_step_can_be_done_again(
    tmp_path: Path, base: Path, failpoint: str
) -> None:
    board = tmp_path / "board"
    killed = run_child(board, base, failpoint)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = run_child(board, base)
    assert again.returncode == 0, again.stderr
    assert_everything_is_right(board, base, NUM_VERSIONS)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_program_that_ends_without_closing_loses_nothing(
    tmp_path: Path, base: Path, threads: int
) -> None:
    program = f"""
import logging, sys
sys.path.insert(0, {str(Path(publish_child.__file__).parent)!r})
from publish_child import trained
from stitch.publish import Publisher
logging.basicConfig(level=logging.WARNING)
publisher = Publisher.start({str(tmp_path / "board")!r}, "r", {str(base)!r}, threads={threads})
publisher.publish(trained(1), step=1)
publisher.publish(trained(2), step=2)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert "event=publisher_not_closed run=r" in done.stderr
    assert "lost" not in done.stderr
    run = quick_board(tmp_path / "board").open_run("r")
    assert run.digest(run.newest()) == digest_at(2)
