"""Loops are compiled once for a machine: another process finds them in numba's cache."""

from __future__ import annotations

import subprocess
import sys

_KEYS = """
import hashlib
from types import SimpleNamespace
from numba.core import sigutils
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target
from stitch.codec import compiling

keys = []

def keep(function, result, *arguments):
    types, _ = sigutils.normalize_signature(result(*arguments))
    key = FunctionCache(function)._index_key(types, cpu_target.target_context.codegen())
    keys.append((function.__module__, function.__qualname__, str(key[0]), key[-1]))
    return SimpleNamespace(py_func=function)

compiling.compiled = keep
from stitch.codec.kernels import warm
warm()
for key in keys:
    print(*key)
"""


def keys() -> list[str]:
    """A line for each loop that there is: where it is, and what numba's cache knows it by."""
    run = subprocess.run(
        [sys.executable, "-c", _KEYS], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_every_process_knows_a_loop_by_the_same_key() -> None:
    first = keys()
    assert len(first) > 100
    assert len({line.split()[0] for line in first}) >= 12
    assert keys() == first
