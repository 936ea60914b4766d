"""What is asked of a stock engine, and how its failures are told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stitch.engines.reload.answers import Answer
    from stitch.engines.reload.checksums import Checksums


class StockRefusedError(Exception):
    """It answered, and the answer is not that all went well."""


class StockLostError(Exception):
    """It did not answer, so what it did is not known."""


@dataclass(frozen=True, kw_only=True)
class StockTraits:
    """`engine`, `salt_field` and `blocked_routes` as in EngineDescription."""

    engine: str
    salt_field: str
    blocked_routes: tuple[str, ...]


class StockEngine(Protocol):
    """A released engine as it can be reached over HTTP.

    Every method raises StockRefusedError or StockLostError; of `load`, either leaves the engine
    unpaused or not as it was.
    """

    traits: StockTraits

    async def check_setup(self) -> None:
        """Raise UsageError for settings under which a reload is not to be trusted."""
        ...

    async def label(self) -> str:
        """The label it was given last, or another text since it started; also: is it alive."""
        ...

    async def set_label(self, label: str) -> None: ...

    async def pause(self) -> None:
        """No step runs until `resume`; requests in flight are kept, and no cache of theirs."""
        ...

    async def resume(self) -> None: ...

    async def load(self, directory: str, label: str) -> None:
        """While paused: load a checkpoint directory, on all ranks."""
        ...

    async def checksums(self) -> Checksums:
        """Of every parameter on every rank, of the bytes that are there now; empty if it has
        none to give."""
        ...

    async def answers(self, prompts: Sequence[Sequence[int]]) -> tuple[Answer, ...]:
        """Greedy answers to prompts of token ids, past all caches; the engine must not be paused.

        Also refused: answers that are not whole, or not finite."""
        ...

    def may_retry(self, error: Exception) -> bool:
        """Whether, after `load` failed so, its later answers can still be trusted."""
        ...

    async def close(self) -> None: ...
