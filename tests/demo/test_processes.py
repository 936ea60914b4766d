"""Children of the demo: logs, deaths, clean ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stitch.demo.processes import Child, ChildDiedError, stop_all


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Child]]:
    """Run Python code as a child."""
    children: list[Child] = []

    def begin(code: str) -> Child:
        (tmp_path / "program.py").write_text(code, encoding="utf-8")
        child = Child(
            "program", "program", [], tmp_path / "program.log", {"PYTHONPATH": str(tmp_path)}
        )
        children.append(child)
        return child

    yield begin
    stop_all(children)


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "condition not met in time"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it goes while it is read
        return False
    return state not in "ZX"


def test_a_death_is_told_with_the_end_of_the_log(start: Callable[[str], Child]) -> None:
    child = start("print('warming up'); raise SystemExit('no disk left')")
    wait_until(lambda: child.exit_code is not None)
    with pytest.raises(ChildDiedError, match="program exited with code 1") as caught:
        child.check()
    assert "no disk left" in caught.value.log_tail
    assert "warming up" in caught.value.log_tail


def test_a_signal_is_named(start: Callable[[str], Child]) -> None:
    child = start("import threading; threading.Event().wait()")
    child.check()
    child.kill()
    with pytest.raises(ChildDiedError, match="killed by signal 9"):
        child.check()


def test_stopping_ends_grandchildren_too(start: Callable[[str], Child]) -> None:
    child = start(
        "import signal, subprocess, sys, threading\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import signal, threading;'\n"
        "    'signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True);'\n"
        "    'threading.Event().wait()'], stdout=subprocess.PIPE)\n"
        "inner.stdout.readline()\n"
        "print(inner.pid, flush=True)\n"
        "threading.Event().wait()\n"
    )
    wait_until(lambda: child.log.read_text().strip().isdecimal())
    inner = int(child.log.read_text())
    deadline_s = time.monotonic()
    child.ask_to_stop()
    child.finish(deadline_s)
    wait_until(lambda: not alive(inner))
    assert child.exit_code == -9
