"""The end of an engine in doubt takes all of its processes with it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from stitch.engines.group.ending import EXIT_STATUS, descendants

PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def test_descendants_are_found_with_their_children() -> None:
    code = (
        "import subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE); "
        "print(child.pid, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], **PIPES) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        assert {parent.pid, grandchild} <= set(descendants(os.getpid()))
        assert descendants(parent.pid) == [grandchild]
        parent.kill()


def test_an_engine_ends_with_the_processes_below_it() -> None:
    code = (
        "import subprocess, sys; from stitch.engines.group.ending import end_engine; "
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE); "
        "print(child.pid, flush=True); input(); end_engine('ranks differ')"
    )
    with subprocess.Popen([sys.executable, "-c", code], **PIPES, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        # The child has the same standard output: it is at its end when both are gone.
        _, errors = parent.communicate(b"\n", timeout=60)
    assert parent.returncode == EXIT_STATUS == 70
    assert b"stitch engine: fatal: ranks differ" in errors
