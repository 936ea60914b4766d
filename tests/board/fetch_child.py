"""Run as a program: fetches the anchor of version 0 of run "math" of board `argv[1]` to `argv[2]`,
and may be killed meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

from stitch.board import open_board

if __name__ == "__main__":
    run = open_board(sys.argv[1]).open_run("math")
    anchor = run.anchor(0)
    assert anchor is not None
    run.fetch_anchor(anchor, Path(sys.argv[2]))
