"""Version stamps from vLLM's own record of which weights a token came from.

vLLM's engine core attaches the label of its weights to what each step puts out, and gives the spans
of a choice with its last output (`CompletionOutput.weight_versions`). Its OpenAI routes keep them
to themselves (0.32), or show them in another shape to those who ask (0.33); so they are noted where
all outputs pass.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from stitch.engines.group.control_asgi import Receive, Scope, Send
from stitch.engines.group.stamping import Notes, stamped

ROUTES = frozenset({"/v1/completions", "/v1/chat/completions"})
_notes: ContextVar[Notes | None] = ContextVar("stitch_notes", default=None)


def tells_versions() -> bool:
    """Whether this vLLM keeps the versions of output tokens."""
    from vllm.outputs import CompletionOutput

    return "weight_versions" in getattr(CompletionOutput, "__dataclass_fields__", {})


class Stamping:
    """ASGI middleware that stamps the answers of ROUTES."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in ROUTES:
            return await self._app(scope, receive, send)
        notes = Notes()
        token = _notes.set(notes)
        try:
            await self._app(scope, receive, stamped(notes, send, json.loads, _dumps))
        finally:
            _notes.reset(token)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def noting(generate: Callable[..., Any]) -> Callable[..., Any]:
    """`AsyncLLM.generate`, noting versions for the request under way.

    A request with several prompts calls it once for each, in their order.
    """

    def generate_noting(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = generate(prompt, sampling_params, *args, **kwargs)
        notes = _notes.get()
        if notes is None:
            return outputs
        return _noted(outputs, notes, notes.expect(getattr(sampling_params, "n", 1)))

    return generate_noting


async def _noted(outputs: Any, notes: Notes, first: int) -> AsyncIterator[Any]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            for choice in output.outputs:
                if choice.weight_versions is not None:
                    spans = [
                        (span.version, span.start, span.end) for span in choice.weight_versions
                    ]
                    notes.put(first + choice.index, spans)
            yield output
