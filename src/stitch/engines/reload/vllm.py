"""A stock vLLM 0.32 or 0.33, over the routes of its development mode."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from stitch.engines.reload.answers import NUM_TOKENS, Answer, Step, checked
from stitch.engines.reload.checksums import Checksums
from stitch.engines.reload.http import QUICK_S, StockHttp
from stitch.engines.reload.recipes import Parameter
from stitch.engines.reload.stock import StockLostError, StockRefusedError, StockTraits
from stitch.engines.vllm.endpoint import BLOCKED_ROUTES
from stitch.errors import UsageError

_KEY = re.compile(r"(?P<place>(?:[a-z]+\d+:)*?tp(?P<rank>\d+)):(?P<name>.+)")
_ONE = "one writer, one engine: start one vLLM for each replica instead of --{option}"
_REFUSED: Mapping[str, tuple[str, object, str]] = {
    "data-parallel-size": ("parallel_config", 1, _ONE),
    "lora-config": ("", None, "a reload drops LoRA adapters: leave out LoRA"),
    "speculative-config": ("", None, "a draft model is not reloaded: leave out --{option}"),
    "quantization": ("model_config", None, "quantised weights do not load twice: leave it out"),
}
"""Setting -> (the part of vLLM's configuration that it is in, the value it must have, why)."""


class StockVllm:
    """Implements StockEngine. `token` is vLLM's API key, which its /v1 routes may want."""

    traits = StockTraits(engine="vllm", salt_field="cache_salt", blocked_routes=BLOCKED_ROUTES)

    def __init__(self, base_url: str, *, token: str | None, timeout_s: float) -> None:
        self._http = StockHttp(base_url, token=token, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._world = 1

    async def check_setup(self) -> None:
        try:
            answer = await self._http.call("GET", "/get_world_size?include_dp=false")
            told = await self._http.call("GET", "/server_info?config_format=json")
        except StockRefusedError as error:
            raise UsageError(
                f"this vLLM has no control routes ({error}): start it with VLLM_SERVER_DEV_MODE=1, "
                "and on loopback, as anyone who reaches it can change its weights then"
            ) from error
        config = told.get("vllm_config")
        if not isinstance(answer.get("world_size"), int) or not isinstance(config, dict):
            raise StockRefusedError(f"it describes itself as {answer!r:.200}, {told!r:.300}")
        self._world = answer["world_size"]
        for option, (where, wanted, why) in _REFUSED.items():
            part = config.get(where, {}) if where else config
            found = part.get(option.replace("-", "_")) if isinstance(part, dict) else wanted
            if found is not None and found != wanted:
                raise UsageError(why.format(option=option))

    async def label(self) -> str:
        await self._http.call("GET", "/health", timeout_s=QUICK_S)
        answer = await self._http.call("GET", "/weight_info", timeout_s=QUICK_S)
        return str(answer.get("weight_version"))

    async def set_label(self, label: str) -> None:
        body = {"new_version": label}
        answer = await self._http.call("POST", "/update_weight_version", body)
        if answer.get("new_version") != label:
            raise StockRefusedError(f"it did not take the label {label!r}: {answer!r:.200}")

    async def pause(self) -> None:
        """Requests in flight lose their keys and values, and so does the prefix cache."""
        await self._http.call("POST", "/pause?mode=keep&clear_cache=true")
        answer = await self._http.call("GET", "/is_paused")
        if answer.get("is_paused") is not True:
            raise StockRefusedError(f"it did not pause: {answer!r:.200}")

    async def resume(self) -> None:
        await self._http.call("POST", "/resume")
        answer = await self._http.call("GET", "/is_paused")
        if answer.get("is_paused") is not False:
            raise StockRefusedError(f"it did not go on: {answer!r:.200}")

    async def load(self, directory: str, label: str) -> None:
        body = {
            "method": "reload_weights",
            "kwargs": {"weights_path": directory},
            "timeout": self._timeout_s,
        }
        answer = await self._http.call("POST", "/collective_rpc", body)
        if answer.get("results") != [None] * self._world:
            raise StockRefusedError(f"its {self._world} ranks answer a reload by {answer!r:.300}")
        cleared = await self._http.call("POST", "/reset_prefix_cache")
        if cleared.get("success") is not True:
            raise StockRefusedError("it keeps keys and values of the weights before")
        await self.set_label(label)

    async def checksums(self) -> Checksums:
        answer = await self._http.call("POST", "/weight_checker", {"action": "checksum"})
        reported = answer.get("checksums")
        if not isinstance(reported, dict) or not reported:
            raise StockRefusedError(f"its checksums are {answer!r:.200}")
        found: dict[tuple[str, int, str], str] = {}
        for key, value in reported.items():
            parts = _KEY.fullmatch(str(key))
            if parts is None or not isinstance(value, str) or len(value) != 64:
                raise StockRefusedError(f"it gives {key!r:.200} the checksum {value!r:.100}")
            found[parts["place"], int(parts["rank"]), parts["name"]] = value
        ranks = 1 + max(rank for _, rank, _ in found)
        return {
            Parameter(place=place, name=name, rank=rank, ranks=ranks): value
            for (place, rank, name), value in found.items()
        }

    async def answers(self, prompts: Sequence[Sequence[int]]) -> tuple[Answer, ...]:
        body = {
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            "cache_salt": f"stitch.proof.{secrets.token_hex(8)}",
        }
        answer = await self._http.call("POST", "/v1/completions", body)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            found = [_answer(choice) for choice in choices]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StockRefusedError(f"a proof got {answer!r:.300} ({error!r})") from error
        return checked(found, len(prompts))

    def may_retry(self, error: Exception) -> bool:
        """With several ranks, answers of the failed call are left behind and taken for those of
        later calls."""
        return self._world == 1 and not isinstance(error, StockLostError)

    async def close(self) -> None:
        await self._http.close()


def _answer(choice: Mapping[str, Any]) -> Answer:
    logprobs = choice["logprobs"]
    steps = []
    for at, token in enumerate(choice["token_ids"]):
        best = sorted(map(float, logprobs["top_logprobs"][at].values()), reverse=True)
        chosen = float(logprobs["token_logprobs"][at])
        # Tokens of one text are told as one: then nothing is known of the lead.
        steps.append(
            Step(token=int(token), logprob=chosen, lead=chosen - best[1] if best[1:] else 0.0)
        )
    return tuple(steps)
