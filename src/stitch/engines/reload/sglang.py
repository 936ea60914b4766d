"""A stock SGLang 0.5.23, over its own routes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from stitch.engines.reload.answers import NUM_TOKENS, Answer, Step, checked
from stitch.engines.reload.checksums import Checksums
from stitch.engines.reload.http import QUICK_S, StockHttp
from stitch.engines.reload.recipes import Parameter
from stitch.engines.reload.stock import StockRefusedError, StockTraits
from stitch.engines.sglang.front import CLOSED, PASS_BY, check_setup
from stitch.errors import UsageError

BLOCKED_ROUTES = (
    *PASS_BY, *sorted(CLOSED),
    "/set_internal_state", "/dumper/*", "/add_external_corpus", "/remove_external_corpus",
    "/list_external_corpora", "/hicache/*", "/start_profile", "/stop_profile", "/set_trace_level",
    "/start_expert_distribution_record", "/stop_expert_distribution_record",
    "/dump_expert_distribution_record", "/init_weights_send_group_for_remote_instance",
    "/send_weights_to_remote_instance", "/get_remote_instance_transfer_engine_info",
    "/remote_instance_transfer_engine_info", "/init_weights_update_group",
    "/destroy_weights_update_group", "/get_weights_by_name", "/weights_checker", "/slow_down",
    "/pd_role_switch", "/load_lora_adapter", "/load_lora_adapter_from_tensors",
    "/unload_lora_adapter", "/configure_logging", "/abort_request",
)  # fmt: skip
"""Routes that SGLang counts as control, sessions, and those that pass by the salt."""

_ALSO_REFUSED = {
    "speculative_algorithm": "a draft model is not proven: leave out {name}",
    "quantization": "quantised weights do not load twice: leave out {name}",
}


class StockSglang:
    """Implements StockEngine. `token` is its admin key (or its only key)."""

    traits = StockTraits(engine="sglang", salt_field="extra_key", blocked_routes=BLOCKED_ROUTES)

    def __init__(self, base_url: str, *, token: str | None, timeout_s: float) -> None:
        self._http = StockHttp(base_url, token=token, timeout_s=timeout_s)

    async def check_setup(self) -> None:
        info = await self._http.call("GET", "/server_info")
        if "tp_size" not in info:
            raise StockRefusedError(f"it describes itself as {info!r:.300}")
        check_setup(info.get)
        for name, why in _ALSO_REFUSED.items():
            if info.get(name):
                raise UsageError(why.format(name="--" + name.replace("_", "-")))

    async def label(self) -> str:
        """Not from /health, which blocks while paused."""
        answer = await self._http.call("GET", "/model_info", timeout_s=QUICK_S)
        return str(answer.get("weight_version"))

    async def set_label(self, label: str) -> None:
        """Without aborting what runs, which is this route's default."""
        body = {"new_version": label, "abort_all_requests": False}
        answer = await self._http.call("POST", "/update_weight_version", body)
        if answer.get("success") is not True:
            raise StockRefusedError(f"it did not take the label {label!r}: {answer!r:.200}")

    async def pause(self) -> None:
        """Requests in flight go back into the queue. It is over before the ranks have done it, but
        they do what they are told in order."""
        answer = await self._http.call("POST", "/pause_generation", {"mode": "retract"})
        if answer.get("status") != "ok":
            raise StockRefusedError(f"it did not pause: {answer!r:.200}")

    async def resume(self) -> None:
        answer = await self._http.call("POST", "/continue_generation", {"torch_empty_cache": False})
        if answer.get("status") != "ok":
            raise StockRefusedError(f"it did not go on: {answer!r:.200}")

    async def load(self, directory: str, label: str) -> None:
        body = {
            "model_path": directory,
            "flush_cache": True,
            "abort_all_requests": False,
            "weight_version": label,
        }
        answer = await self._http.call("POST", "/update_weights_from_disk", body)
        if answer.get("success") is not True:
            raise StockRefusedError(f"it did not load {directory}: {answer!r:.300}")

    async def checksums(self) -> Checksums:
        answer = await self._http.call("POST", "/weights_checker", {"action": "checksum"})
        found: dict[Parameter, str] = {}
        try:
            if answer["success"] is not True or not answer["ranks"]:
                raise ValueError("not successful")
            for rank in answer["ranks"]:
                (where,) = rank["parallelism_info"]  # one a model: there is no draft
                for name, value in rank["checksums"].items():
                    if not isinstance(value, str) or len(value) < 16:
                        raise ValueError(f"{name} has checksum {value!r:.100}")
                    parameter = Parameter(
                        place=f"{where['role']}:{where['rank']}",
                        name=name,
                        rank=int(where["tp_rank"]),
                        ranks=int(where["tp_size"]),
                    )
                    found[parameter] = value
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StockRefusedError(f"its checksums are {answer!r:.300} ({error!r})") from error
        return found

    async def answers(self, prompts: Sequence[Sequence[int]]) -> tuple[Answer, ...]:
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {
                "max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            },
            "return_logprob": True,
            "top_logprobs_num": 2,
            "extra_key": [f"stitch.proof.{secrets.token_hex(8)}" for _ in prompts],
        }  # fmt: skip
        answer = await self._http.ask("POST", "/generate", body)
        try:
            found = [_answer(one["meta_info"]) for one in answer]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StockRefusedError(f"a proof got {answer!r:.300} ({error!r})") from error
        return checked(found, len(prompts))

    def may_retry(self, error: Exception) -> bool:
        """Its failed reload has already tried to go back, from the same directory, and died if it
        could not."""
        return isinstance(error, StockRefusedError)

    async def close(self) -> None:
        await self._http.close()


def _answer(meta: Mapping[str, Any]) -> Answer:
    """From lists of [log probability, token, text]: of the chosen tokens, and of the likeliest."""
    steps = []
    for at, (logprob, token, *_) in enumerate(meta["output_token_logprobs"]):
        best = sorted((float(entry[0]) for entry in meta["output_top_logprobs"][at]), reverse=True)
        chosen = float(logprob)
        steps.append(
            Step(token=int(token), logprob=chosen, lead=chosen - best[1] if best[1:] else 0.0)
        )
    return tuple(steps)
