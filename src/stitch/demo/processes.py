"""Child processes that cannot outlive the demo, with their output in files."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from stitch.demo.output import tail
from stitch.errors import FatalError

STOP_GRACE_S = 5.0


class ChildDiedError(FatalError):
    """A process that the demo depends on ended before its time; `log_tail` shows why."""

    def __init__(self, message: str, log_tail: str) -> None:
        super().__init__(message)
        self.log_tail = log_tail


def child_environment(threads: int = 1) -> dict[str, str]:
    """Must be set before torch is imported: spinning OpenMP barriers of several processes on few
    cores turn seconds into minutes."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


class Child:
    """`python -m MODULE ARGS...` in a process group of its own, output appended to `log`."""

    def __init__(
        self, name: str, module: str, args: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        # The kernel kills it when this process ends in whatever way.
        tether = [sys.executable, "-m", "stitch.engines.tether", str(os.getpid()), "--"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*tether, sys.executable, "-m", module, *args],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.started_unix_s = time.time()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.poll()

    def check(self) -> None:
        """Raise ChildDiedError, with the end of its log, if it is gone."""
        code = self.exit_code
        if code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            raise ChildDiedError(f"{self.name} {how}; its log is {self.log}", self.log_tail())

    def log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return tail(self.log.read_text(encoding="utf-8", errors="replace")[-20_000:])
        return "  | (no log)"

    def kill(self) -> None:
        """SIGKILL to this process alone, as in a crash; its children see to themselves."""
        self._process.kill()
        self._process.wait()

    def ask_to_stop(self) -> None:
        self._signal_group(signal.SIGTERM)

    def finish(self, deadline_s: float) -> None:
        """Wait until the monotonic time `deadline_s`, then SIGKILL what is left of the group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        self._signal_group(signal.SIGKILL)
        self._process.wait()

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def stop_all(children: Sequence[Child]) -> None:
    """End all children together, in good order if they manage within STOP_GRACE_S."""
    for child in children:
        child.ask_to_stop()
    deadline_s = time.monotonic() + STOP_GRACE_S
    for child in children:
        child.finish(deadline_s)
