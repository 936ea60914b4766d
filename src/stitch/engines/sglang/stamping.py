"""Version stamps from SGLang's own record of which weights a token came from.

SGLang counts, in its schedulers, which output tokens were made under which version, and gives the
spans with the last answer of each choice (`meta_info.weight_versions`). Its OpenAI routes show
those of the first choice only, and none in streams; so they are noted where all answers pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from stitch.engines.group.control_asgi import Scope, Send
from stitch.engines.group.stamping import Dumps, Loads, Notes, stamped

ROUTES = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
_NOTES = "stitch.versions"


def noting(generate: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    """`TokenizerManager.generate_request`, noting versions for requests that carry `Notes`."""

    async def generate_request(
        obj: Any, request: Any = None, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        notes = None if request is None else request.scope.get(_NOTES)
        answers = generate(obj, request, *args, **kwargs)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                if notes is not None:
                    _note(notes, answer)
                yield answer

    return generate_request


def _note(notes: Notes, answer: Any) -> None:
    """Note what an answer of the tokenizer manager says: of one choice, or a list of all."""
    numbered = enumerate(answer) if isinstance(answer, list) else [(answer.get("index", 0), answer)]
    for index, one in numbered:
        notes.see(index)
        spans = one.get("meta_info", {}).get("weight_versions")
        if spans:
            notes.put(index, [(span["version"], span["start"], span["end"]) for span in spans])


def stamping(scope: Scope, send: Send, loads: Loads, dumps: Dumps) -> Send:
    """A `send` that stamps the answer to the request of `scope`."""
    scope[_NOTES] = notes = Notes()
    return stamped(notes, send, loads, dumps)
