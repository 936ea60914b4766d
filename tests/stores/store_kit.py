"""What the tests on servers share."""

from __future__ import annotations

from collections.abc import Callable

from stitch.board import Board, Patience

QUICK = Patience(first_wait_s=0.01, max_wait_s=0.1)

OpenBoard = Callable[..., Board]
"""`open_on(server, prefix=None, *, port=None, options="", unsigned=False)` opens a board there."""
