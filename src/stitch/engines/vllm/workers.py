"""Workers over vLLM's own client: collective RPCs, and its switches for pausing."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, NoReturn

from stitch.engines.group.ending import end_engine
from stitch.engines.group.replies import own_answers
from stitch.engines.group.workers import WorkersLostError
from stitch.engines.ranks.port import Answer
from stitch.types import VersionRef

IN_BACKGROUND = frozenset({"stage_part", "seal", "lanes"})
"""What a rank does in a thread: an RPC of vLLM's holds up the next step until it is answered."""
_FIRST_POLL_S = 0.001
_LAST_POLL_S = 0.02


class VllmWorkers:
    """`client` is vLLM's AsyncLLM, as endpoint plugins get it; `world` is its number of ranks."""

    def __init__(self, client: Any, world: int, *, multimodal: bool = False) -> None:
        self._client = client
        self._world = world
        self._multimodal = multimodal
        self._numbers = itertools.count(1)

    async def call(self, method: str, *args: object) -> list[Answer]:
        if method not in IN_BACKGROUND:
            return await self._rpc(method, *args)
        ticket = f"{method}-{next(self._numbers)}"
        answers = await self._rpc("begin", ticket, method, list(args))
        running = [rank for rank, answer in enumerate(answers) if answer.get("ok")]
        pause_s = _FIRST_POLL_S
        while running:
            await asyncio.sleep(pause_s)
            pause_s = min(_LAST_POLL_S, 1.5 * pause_s)
            found = await self._rpc("finish", ticket)
            for rank in list(running):
                if not found[rank].get("running"):
                    answers[rank] = found[rank]
                    running.remove(rank)
        return answers

    async def _rpc(self, method: str, *args: object) -> list[Answer]:
        """One collective RPC, whose answers are proven to be its own."""
        number = next(self._numbers)
        try:
            answers = await self._client.collective_rpc(
                "stitch_call", args=(number, method, list(args))
            )
        except Exception as error:  # whatever broke: other ranks' answers may still be queued
            raise WorkersLostError(f"the RPC {method} failed: {error!r:.500}") from error
        return own_answers(answers, number=number, method=method, world=self._world)

    async def pause(self) -> None:
        """Keeps requests in flight; their keys and values are computed anew afterwards.

        vLLM's `pause_generation` does the same and then sleeps for 20 ms.
        """
        core: Any = getattr(self._client, "engine_core", None)
        if not hasattr(core, "pause_scheduler_async"):
            await self._client.pause_generation(mode="keep", clear_cache=True)
            return
        if self._multimodal:
            await self._client.renderer.clear_mm_cache_async()
        await core.pause_scheduler_async(mode="keep", clear_cache=True)

    async def resume(self) -> None:
        await self._client.resume_generation()

    async def label(self, ref: VersionRef) -> None:
        if hasattr(self._client, "update_weight_version"):
            await self._client.update_weight_version(str(ref.version))

    def is_alive(self) -> bool:
        return not self._client.errored

    def exit(self, reason: str) -> NoReturn:
        end_engine(reason)
