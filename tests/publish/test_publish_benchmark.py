"""The benchmark runs, at a small size, and prints what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_publish_benchmark_prints_its_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.publish", "--json"]
    command += ["--gb", "0.05", "--rounds", "2", "--dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["source_dtype"] for row in result["rows"]] == ["bfloat16", "float32"]
    for figure in ("blocked_over_copy", "peak_over_view"):
        assert result[figure] == max(row[figure] for row in result["rows"]) > 0
    assert result["rows"][0]["view_bytes"] == result["rows"][1]["view_bytes"]
    assert list(tmp_path.iterdir()) == []
