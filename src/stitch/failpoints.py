"""Named points at which a test can kill the process, to prove every durable step old-or-new.

`STITCH_FAILPOINT=name` or `name:k` sends SIGKILL to this process when `reach(name)` is called for
the k-th time (k from 1). Without the variable, `reach` costs one comparison.
"""

from __future__ import annotations

import os
import signal

from stitch.errors import UsageError

_armed = os.environ.get("STITCH_FAILPOINT", "")
_name, _, _count = _armed.partition(":")
if _count and not (_count.isascii() and _count.isdigit()):
    raise UsageError(f"STITCH_FAILPOINT must be NAME or NAME:K, got {_armed!r:.100}")
_left = int(_count) if _count else 1


def reach(name: str) -> None:
    """Die here if this failpoint is armed and this is the chosen pass."""
    global _left
    if _armed and name == _name:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
