"""`stitch demo --tiny` as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STITCH = [sys.executable, "-m", "stitch.cli"]


def processes_of(marker: Path) -> list[str]:
    """Command lines of running processes that mention `marker`."""
    found = []
    for directory in Path("/proc").iterdir():
        try:
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        if str(marker) in command:
            found.append(command)
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "condition not met in time"
        time.sleep(0.002)


def all_gone(place: Path) -> bool:
    """Whether the processes are gone, if need be after the kernel has done what it was told."""
    wait_until(lambda: processes_of(place) == [], timeout_s=20)
    return True


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One whole run: its exit code, its output and its report."""
    place = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [*STITCH, "demo", "--tiny", "--work", str(place / "work")],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    logs = {path.name: path.read_text()[-3000:] for path in (place / "work").glob("*.log")}
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    report = json.loads((place / "demo-report.json").read_text())
    return {"output": done.stdout, "report": report, "all_gone": all_gone(place)}


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_every_replica_ends_with_the_trainers_weights_bit_for_bit(finished: dict[str, Any]) -> None:
    report = finished["report"]
    assert report["bit_exact"] is True
    trainer = report["trainer"]
    assert [r["id"] for r in report["replicas"]] == ["r1", "r2", "r3"]
    for replica in report["replicas"]:
        assert (replica["version"], replica["digest"]) == (trainer["version"], trainer["digest"])
    assert trainer["digest"] != trainer["base_digest"]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_one_replica_joined_late_and_one_was_killed(finished: dict[str, Any]) -> None:
    replicas = {r["id"]: (r["joined"], r["killed"]) for r in finished["report"]["replicas"]}
    assert replicas == {"r1": ("start", False), "r2": ("restarted", True), "r3": ("late", False)}


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_no_request_failed_and_many_versions_served(finished: dict[str, Any]) -> None:
    report = finished["report"]
    assert report["requests"]["failed"] == 0
    assert report["requests"]["total"] > report["requests"]["rollouts"] >= 32
    assert report["requests"]["spanning_versions"] > 0
    assert report["versions_served"] >= 6


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_each_version_is_reported_with_its_costs(finished: dict[str, Any]) -> None:
    rows = finished["report"]["versions"]
    assert [row["version"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 8
    for row in rows:
        assert 0 < row["density"] < 0.2
        assert row["patch_bytes"] > 0
        assert row["reward"] is not None
        assert row["pause_ms"] is None or row["pause_ms"] > 0
        # Asked when version - 2 was the newest, of replicas at most one version behind that.
        oldest, newest = min(row["samples_from"]), max(row["samples_from"])
        assert row["version"] - 3 <= oldest <= newest < row["version"]
    assert "bit-exact: yes" in finished["output"]
    assert f"{rows[0]['density']:.3%}" in finished["output"]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_no_process_is_left_behind(finished: dict[str, Any]) -> None:
    assert finished["all_gone"]


def started(place: Path) -> subprocess.Popen[bytes]:
    """A demo whose trainer and first replicas have been started."""
    with (place / "output").open("wb") as output:
        demo = subprocess.Popen(
            [*STITCH, "demo", "--tiny", "--work", str(place / "work")],
            cwd=place,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    wait_until(lambda: (place / "work" / "r2.log").exists())
    return demo


@pytest.mark.timeout(300)
def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    demo = started(tmp_path)
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130
    assert all_gone(tmp_path)
    assert not (tmp_path / "demo-report.json").exists()


@pytest.mark.timeout(300)
def test_killing_the_demo_ends_all_processes(tmp_path: Path) -> None:
    demo = started(tmp_path)
    demo.kill()
    demo.wait(60)
    assert all_gone(tmp_path)


def test_too_few_steps_for_the_story_are_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [*STITCH, "demo", "--tiny", "--steps", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "at least 6 steps, got 3" in done.stderr
