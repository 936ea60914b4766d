"""ControlClient: the engine port spoken over HTTP to another process."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
from yarl import URL

from stitch.codec import UpdateSet
from stitch.engines import wire
from stitch.engines.parts import split_update
from stitch.engines.port import CommitReceipt, EngineDescription, VerifyReport
from stitch.errors import EngineUnreachableError
from stitch.types import Schema, VersionRef

_Answer = TypeVar("_Answer")


class ControlClient:
    """Implements the Engine port against `base_url` (the engine's address, without a path).

    `schema` is the view's schema, needed to write update sets. Time limits are per request:
    `describe_timeout_s` for describe, `timeout_s` for everything else.
    """

    def __init__(
        self,
        base_url: str,
        token: str,
        *,
        schema: Schema,
        timeout_s: float = 120.0,
        describe_timeout_s: float = 5.0,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._schema = schema
        self._timeout_s = timeout_s
        self._describe_timeout_s = describe_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def describe(self) -> EngineDescription:
        body = await self._call("GET", "describe", timeout_s=self._describe_timeout_s)
        return _read(wire.description_from_json, body)

    async def bind(self, ref: VersionRef, digest: str) -> None:
        await self._call("POST", "bind", {"run": ref.run, "version": ref.version, "digest": digest})

    async def stage(
        self, stage_id: str, base: VersionRef, target: VersionRef, update: UpdateSet
    ) -> None:
        opening = {
            "stage_id": stage_id,
            "base": wire.ref_to_json(base),
            "target": wire.ref_to_json(target),
        }
        await self._call("POST", "stage", opening)
        path = f"stage/{quote(stage_id, safe='')}"
        num_parts = 0
        for part in split_update(update):
            data = await asyncio.to_thread(part.to_bytes, self._schema)
            await self._call("PUT", f"{path}/parts/{num_parts}", data)
            num_parts += 1
        seal = {"num_parts": num_parts, "num_changed": update.num_changed}
        await self._call("POST", f"{path}/seal", seal)

    async def commit(self, stage_id: str) -> CommitReceipt:
        body = await self._call("POST", "commit", {"stage_id": stage_id})
        return _read(wire.receipt_from_json, body)

    async def roll_back(self, to: VersionRef) -> None:
        await self._call("POST", "roll_back", wire.ref_to_json(to))

    async def discard(self) -> None:
        await self._call("DELETE", "stage")

    async def verify(self, names: Sequence[str] | None = None) -> VerifyReport:
        body = None if names is None else {"tensors": list(names)}
        return _read(wire.report_from_json, await self._call("POST", "verify", body))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(
        self, method: str, path: str, body: object = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """One request; raises what the engine reported, or EngineUnreachableError."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        payload: dict[str, Any] = {}
        if isinstance(body, bytes):
            payload["data"] = io.BytesIO(body)
        elif body is not None:
            payload["json"] = body
        # The path is already quoted; yarl must not quote it again.
        url = f"{self._base_url}{wire.PREFIX}/{path}"
        try:
            async with self._client().request(
                method,
                URL(url, encoded=True),
                timeout=aiohttp.ClientTimeout(total=limit_s),
                **payload,
            ) as response:
                answer = await response.json(content_type=None)
                status = response.status
        except TimeoutError:
            raise EngineUnreachableError(
                f"engine {self._base_url} did not answer {method} {path} within {limit_s:g} s"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineUnreachableError(
                f"engine {self._base_url} broke off {method} {path}: {error!r}"
            ) from error
        if status != 200:
            raise wire.error_from_json(answer, status)
        if not isinstance(answer, dict):
            raise EngineUnreachableError(f"engine {self._base_url}: {path} is not an object")
        return answer

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                # A fresh connection per call: a kept one that the engine closed meanwhile would
                # leave it unknown whether the call happened.
                connector=aiohttp.TCPConnector(limit=8, force_close=True),
            )
        return self._session


def _read(parse: Callable[[Mapping[str, Any]], _Answer], body: Mapping[str, Any]) -> _Answer:
    """An answer's content; EngineUnreachableError if it is not one of the control interface."""
    try:
        return parse(body)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineUnreachableError(
            f"what the engine answered makes no sense ({error!r}): {body!r:.300}"
        ) from error
