"""Workers: what the front of a group asks of whatever joins it to its ranks."""

from __future__ import annotations

from typing import NoReturn, Protocol

from stitch.engines.ranks.port import Answer
from stitch.errors import FatalReplicaError
from stitch.types import VersionRef


class WorkersLostError(FatalReplicaError):
    """Answers of ranks did not come, or cannot be told apart from those of another call."""


class Workers(Protocol):
    """All ranks of one engine, and the engine's own switches."""

    async def call(self, method: str, *args: object) -> list[Answer]:
        """Have every rank do `method` of the port `Rank`; answers in order of rank.

        Returns when the last rank has answered, whatever any of them answered. What may take long
        while serving goes on (`stage_part`, `seal`, `lanes`) holds up no step. Raises
        WorkersLostError when the answers cannot be had: then what the ranks did is not known, and
        no later answer may be trusted.
        """
        ...

    async def pause(self) -> None:
        """No step runs when it returns, and none until `resume`; requests in flight are kept, and
        no key or value computed so far, nor what a cache holds, serves any later step."""
        ...

    async def resume(self) -> None:
        """Go on with the requests in flight and those that came meanwhile."""
        ...

    async def label(self, ref: VersionRef) -> None:
        """Tell the engine which version it serves, where it has a field for that."""
        ...

    def is_alive(self) -> bool:
        """False once the engine behind can do no more work."""
        ...

    def exit(self, reason: str) -> NoReturn:
        """End the engine with all its processes, status 70, saying why: it is in doubt."""
        ...
