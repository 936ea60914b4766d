"""`python -m stitch.engines.tether PARENT_PID -- COMMAND...`: a command that dies with its parent.

An engine must not outlive the replica that watches it. The kernel sends SIGKILL to this process
when the thread that started it ends, and the setting survives exec (prctl(2), PR_SET_PDEATHSIG).
Doing it in a small program instead of a `preexec_fn` keeps fork safe in a threaded parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    if len(argv) < 3 or argv[1] != "--" or not argv[0].isdigit():
        print(__doc__, file=sys.stderr)
        return 2
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            print(f"tether: prctl failed: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
            return 1
    if os.getppid() != int(argv[0]):
        print("tether: the parent is already gone", file=sys.stderr)
        return 1
    try:
        os.execvp(argv[2], argv[2:])
    except OSError as error:
        print(f"tether: cannot run {argv[2]}: {error}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
