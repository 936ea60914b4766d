"""Copying the runs of one board to another, so that a region reads from its own store.

What is copied, in which order, and what is not: docs/protocol.md, "Copying a board".
"""

from stitch.board.copying.boards import BoardCopier
from stitch.board.copying.follow import follow
from stitch.board.copying.objects import Copied

__all__ = ["BoardCopier", "Copied", "follow"]
