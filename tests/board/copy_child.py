"""`python copy_child.py SOURCE TARGET`: copies a board in a directory, to be killed."""

from __future__ import annotations

import sys

from stitch.board import open_board
from stitch.board.copying import BoardCopier

if __name__ == "__main__":
    BoardCopier(open_board(sys.argv[1]), open_board(sys.argv[2])).copy()
