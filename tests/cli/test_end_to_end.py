"""The program and the client with a real replica: publish, serve, ask, watch, verify, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Program, words_of

from stitch.client import Client

pytest.importorskip("torch")
pytest.importorskip("transformers")


@contextmanager
def serving(board: Path, model: Path, name: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """`stitch serve` with the embedded engine, as a process of its own."""
    arguments = ["serve", "--board", str(board), "--model", str(model), "--id", name, "--json"]
    arguments += ["--port", "0", "--poll-interval", "0.1", "--heartbeat-interval-s", "0.2"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "stitch.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait(timeout=30)
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_replica_follows_what_is_published_and_proves_it(
    stitch: Program, chain: list[Path], tmp_path: Path
) -> None:
    board = tmp_path / "board"
    on_board = ("--board", board)
    stitch.ok("publish", chain[1], *on_board, "--run", "math", "--base", chain[0])
    log = tmp_path / "replica.log"
    with serving(board, chain[0], "r1", log) as process:
        announced = read_line(process)
        assert announced["replica"] == "r1", log.read_text()
        with Client(board, deadline_s=100, refresh_s=0.1) as client:
            answer = client.completions(prompt="1 + 1", max_tokens=4, min_version=1)
            assert (answer.version_start, answer.replica, answer.run) == (1, "r1", "math")
            stitch.ok("publish", chain[2], *on_board, "--step", 2)
            answers = client.map([{"prompt": "2", "max_tokens": 4}] * 4, min_version=2)
            assert [a.version_start for a in answers] == [2] * 4
            assert answers[0].spans()[0].version == 2
            with client.stream(prompt="3", max_tokens=4, min_version=2) as stream:
                events = list(stream)
            assert events[-1]["object"] == "stitch.versions"
            assert (stream.version_start, stream.version_end) == (2, 2)
        check_status_and_proof(stitch, board)
        stitch.ok("checkout", "latest", "--out", tmp_path / "out", *on_board)
        assert words_of(tmp_path / "out") == words_of(chain[2])
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
    assert stitch.ok("status", *on_board)["replicas"] == []


def check_status_and_proof(stitch: Program, board: Path) -> None:
    proof = stitch.ok("verify", "--replicas", "--board", board)
    assert proof["equal"]
    assert [row["version"] for row in proof["replicas"]] == [2]
    row = row_of_version(stitch, board, 2)
    assert (row["replica"], row["applied"], row["lag"], row["ready"]) == ("r1", 2, 0, True)
    for record in row["versions"]:
        assert record["version"] in (1, 2)


def row_of_version(stitch: Program, board: Path, version: int) -> Any:
    """What the board says of the replica, once its heartbeat has caught up with what it serves."""
    ends_s = time.monotonic() + 60
    while True:
        (row,) = stitch.ok("status", "--board", board)["replicas"]
        if row["applied"] == version or time.monotonic() > ends_s:
            return row
        time.sleep(0.05)


def read_line(process: subprocess.Popen[str]) -> Any:
    """The object that the process prints first."""
    found: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: found.append(process.stdout.readline()), daemon=True)
    reader.start()
    reader.join(timeout=120)
    assert found, "nothing was printed"
    return json.loads(found[0])
