"""The proxy's benchmark runs and says what the documentation quotes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_prints_one_object_with_a_row_per_number_of_connections() -> None:
    command = [sys.executable, "-m", "benchmarks.proxy", "--json", "--connections", "1,4"]
    command += ["--seconds", "0.2", "--stack", "aiohttp", "--stack", "starlette"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for rows in (result["rows"], *result["stacks"].values()):
        assert [row["connections"] for row in rows] == [1, 4]
        for row in rows:
            assert row.keys() == {
                "connections",
                "added_p50_ms",
                "added_p99_ms",
                "requests_per_s_direct",
                "requests_per_s_proxied",
            }
            assert row["requests_per_s_proxied"] > 0
