"""Named points at which a test can kill the process, to prove that every durable step is old-or-new.

`STITCH_FAILPOINT=name` or `name:k` sends SIGKILL to this process when `reach(name)` is called for
the k-th time (k from 1). Without the variable, `reach` costs one comparison.
"""

from __future__ import annotations

import os
import signal

_armed = os.environ.get("STITCH_FAILPOINT", "")
_name, _, _count = _armed.partition(":")
_left = int(_count) if _count else 1


def reach(name: str) -> None:
    """Die here if this failpoint is armed and this is the chosen pass."""
    global _left
    if _armed and name == _name:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
