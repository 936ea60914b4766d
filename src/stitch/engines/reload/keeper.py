"""`python -m stitch.engines.reload.keeper PARENT_PID -- COMMAND...`: no process of it stays.

Stock engines notice only an orderly end of their parents, if at all: killed, they leave workers
behind that hold the memory of the device. This process starts the engine, passes signals on, and
takes in its orphans; when the engine or the parent ends, it ends all that is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys

from stitch.engines.group.ending import descendants

GRACE_S = 15.0
"""Time that an engine has to end once it is told to."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(argv: list[str]) -> int:
    if len(argv) < 3 or argv[1] != "--" or not argv[0].isdigit():
        print(__doc__, file=sys.stderr)
        return 2
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parent = os.pidfd_open(int(argv[0]))
    # From here on the parent's end is seen; dying of it would leave the engine behind.
    libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    if os.getppid() != int(argv[0]):
        print("keeper: the parent is already gone", file=sys.stderr)
        return 1
    # Signals are read like the rest, and must not come before there is an engine to tell.
    told, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    engine = subprocess.Popen(argv[2:])
    try:
        return _until_an_end(engine, parent, told)
    finally:
        _end_all()


def _until_an_end(engine: subprocess.Popen[bytes], parent: int, told: int) -> int:
    """Wait for the engine's end, or the parent's, or for a signal and then the engine's end."""
    child = os.pidfd_open(engine.pid)
    poll = select.poll()
    for fd in (child, parent, told):
        poll.register(fd, select.POLLIN)
    ended = {fd for fd, _ in poll.poll()}
    if told in ended:
        engine.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine.wait(GRACE_S)
    elif child not in ended:
        print("keeper: the parent ended; so does the engine", file=sys.stderr)
    if engine.poll() is None:
        return 1
    status = engine.wait()
    return status if status >= 0 else 128 - status


def _end_all() -> None:
    """End everything below this process, also what is started meanwhile."""
    while left := [pid for pid in descendants(os.getpid()) if not _reaped(pid)]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _reaped(pid: int) -> bool:
    """Take the status of a child that has ended."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
