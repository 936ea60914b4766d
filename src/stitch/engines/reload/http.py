"""JSON over HTTP to an engine's own routes; an answer is checked before it is believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp

from stitch.engines.reload.stock import StockLostError, StockRefusedError

QUICK_S = 5.0
"""Time for calls that need no work of the engine's ranks."""


class StockHttp:
    """Calls to one engine; `timeout_s` is for those that do work."""

    def __init__(self, base_url: str, *, token: str | None, timeout_s: float) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """The answer's object, empty if it has no body.

        Raises StockRefusedError for any status but 200 and for what is not an object, and
        StockLostError if no answer came.
        """
        answer = await self.ask(method, path, body, timeout_s=timeout_s)
        if not isinstance(answer, dict):
            raise StockRefusedError(f"{method} {path} got {answer!r:.300}")
        return answer

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """As `call`, for any JSON."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        payload: dict[str, Any] = {} if body is None else {"json": dict(body)}
        try:
            async with self._client().request(
                method,
                self._base_url + path,
                timeout=aiohttp.ClientTimeout(total=limit_s),
                **payload,
            ) as response:
                text, status = await response.text(), response.status
                if status != 200:
                    raise StockRefusedError(f"{method} {path} got {status}: {text!r:.500}")
                answer = await response.json(content_type=None) if text.strip() else {}
        except TimeoutError:
            raise StockLostError(f"{method} {path} had no answer within {limit_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise StockLostError(f"{method} {path} broke off: {error!r}") from error
        except ValueError as error:
            raise StockRefusedError(f"{method} {path} got no JSON: {error}") from error
        return answer

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                # A kept connection that was closed meanwhile would leave it unknown what happened.
                connector=aiohttp.TCPConnector(limit=8, force_close=True),
            )
        return self._session
