"""No compiled loop leaves its arrays, whatever it is given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_loops_stay_inside_their_arrays(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """In a process of its own, with loops compiled anew; these are kept for the next time."""
    kept = getattr(pytestconfig, "cache", None)
    place = kept.mkdir("checked-loops") if kept else tmp_path
    script = Path(__file__).with_name("check_bounds.py")
    done = subprocess.run(
        [sys.executable, str(script), "600"],
        env={**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "600 payloads\n", done.stderr
