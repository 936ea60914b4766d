"""Workers over SGLang: one socket a rank, and the tokenizer manager's switches for pausing."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from stitch.engines.group.ending import end_engine
from stitch.engines.group.replies import own_answers
from stitch.engines.group.workers import WorkersLostError
from stitch.engines.ranks.port import Answer, check
from stitch.engines.sglang import frames
from stitch.engines.sglang.rank_server import socket_path
from stitch.types import VersionRef

PAUSE_S = 120.0
"""How long a step, and whatever the schedulers do before the pause, may take."""

Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class SglangWorkers:
    """`manager` is SGLang's TokenizerManager, `messages` its module io_struct; see `connected`."""

    def __init__(self, manager: Any, messages: Any, links: Sequence[Link]) -> None:
        self._manager = manager
        self._messages = messages
        self._links = links
        self._numbers = itertools.count(1)
        self._paused = False

    @classmethod
    async def connected(
        cls, manager: Any, messages: Any, sockets: Path, world: int
    ) -> SglangWorkers:
        """Connect to every rank's socket; they listen before SGLang says that they are ready.

        Raises WorkersLostError if one does not. Then the sockets are of no more use, and removed.
        """
        links: list[Link] = []
        for rank in range(world):
            path = socket_path(sockets, rank)
            try:
                links.append(await asyncio.open_unix_connection(path))
            except OSError as error:
                raise WorkersLostError(
                    f"rank {rank} does not listen: {error}; did its process take the plugin?"
                ) from error
        shutil.rmtree(sockets, ignore_errors=True)
        return cls(manager, messages, links)

    async def call(self, method: str, *args: object) -> list[Answer]:
        if method != "learn":
            return await self._ask(method, *args)
        await self.pause()
        try:
            return await self._ask(method, *args)
        finally:
            await self.resume()

    async def _ask(self, method: str, *args: object) -> list[Answer]:
        number = next(self._numbers)
        message = frames.frame({"call": number, "method": method, "args": list(args)})
        asked = [self._exchange(link, message) for link in self._links]
        try:
            answers = await asyncio.gather(*asked)
        except Exception as error:  # whatever broke: a rank's answer may still be on its way
            raise WorkersLostError(f"call {number} ({method}) broke off: {error!r:.500}") from error
        return own_answers(answers, number=number, method=method, world=len(self._links))

    async def _exchange(self, link: Link, message: bytes) -> dict[str, Any]:
        reader, writer = link
        writer.write(message)
        await writer.drain()
        return await frames.read(reader)

    async def pause(self) -> None:
        """Takes requests in flight back into the queue: afterwards their keys and values are
        computed anew. No cache holds anything when it returns."""
        check(await self._ask("expect"))
        await self._manager.pause_generation(self._messages.PauseGenerationReqInput(mode="retract"))
        check(await self._ask("quiet", PAUSE_S))
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        check(await self._ask("release"))
        await self._manager.continue_generation(
            self._messages.ContinueGenerationReqInput(torch_empty_cache=False)
        )

    async def label(self, ref: VersionRef) -> None:
        """SGLang keeps the version twice: for tokens in the schedulers, for answers here."""
        version = str(ref.version)
        if self._paused:
            check(await self._ask("label", version))
            self._manager._update_weight_version_if_provided(version)
        else:
            await self._manager.update_weight_version(
                self._messages.UpdateWeightVersionReqInput(
                    new_version=version, abort_all_requests=False
                )
            )

    def is_alive(self) -> bool:
        return not any(reader.at_eof() for reader, _ in self._links)

    def exit(self, reason: str) -> NoReturn:
        end_engine(reason)
