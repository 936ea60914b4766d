"""Run as a program: does one durable step of a board at `argv[1]`, and may be killed inside it."""

from __future__ import annotations

import sys
from pathlib import Path

from board_kit import NO_WAITS, new_run, publish

from stitch.board import open_board


def main(root: str, what: str) -> None:
    board = open_board(root, patience=NO_WAITS)
    if what == "run":
        board.put_asset("new", "config.json", b"{}")
        new_run(board, "new")
    elif what == "epoch":
        board.begin_epoch("math", "killed")
    elif what == "anchor":
        board.open_run("math").write_anchor(2, Path(root).parent / "weights", writer="killed")
    else:
        run = board.open_run("math")
        publish(run, 3, b"the patch that may be lost", writer="killed")
        run.write_head(3)
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
