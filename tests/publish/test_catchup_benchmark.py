"""A small run of the catch-up benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_replica_far_behind_fetches_about_the_direct_difference(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.catchup", "--json", "--elements", "300000"]
    done = subprocess.run(
        [*command, "--no-real", "--steps", "16", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    result = json.loads(done.stdout)
    rows = {row["behind"]: row for row in result["rows"]}
    assert set(rows) == {1, 8, 16}
    assert rows[1]["objects"] == rows[1]["objects_chain"] == 2
    assert rows[16]["objects"] <= 4
    assert rows[16]["objects_chain"] == 32
    for behind in (8, 16):
        # Records weigh more here than with the weights of a model.
        assert rows[behind]["bytes"] <= 1.25 * rows[behind]["bytes_direct"]
        assert rows[behind]["bytes"] <= 0.6 * rows[behind]["bytes_chain"]
    assert result["compaction"]["merged_patches"] == 4 + 2 + 1
