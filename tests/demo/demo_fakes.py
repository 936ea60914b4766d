"""A client that samples from a model in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from stitch.client import Answer


class SamplingClient:
    """Answers completion requests from a model in memory, as a replica would word it."""

    def __init__(self, model: Any, tokenizer: Any, version: int = 3) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._version = version
        self.options: list[dict[str, Any]] = []
        self.spoil: Callable[[dict[str, Any]], None] = lambda choice: None

    def submit(self, path: str, body: dict[str, Any], **options: Any) -> Future[Answer]:
        assert path == "/v1/completions"
        self.options.append(options)
        torch.manual_seed(body["seed"])
        choices = [self._choice(body) for _ in range(body["n"])]
        future: Future[Answer] = Future()
        future.set_result(
            Answer(
                body={"choices": choices},
                version_start=self._version,
                version_end=self._version,
                run="demo",
                replica="r1",
                attempts=2,
            )
        )
        return future

    @torch.no_grad()
    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, logprobs = list(body["prompt"]), []
        for _ in range(body["max_tokens"]):
            scores = self._model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(scores.exp(), 1))
            ids.append(token)
            logprobs.append(float(scores[token]))
        output = ids[len(body["prompt"]) :]
        half = len(output) // 2
        choice: dict[str, Any] = {
            "text": self._tokenizer.decode(output),
            "token_ids": output,
            "logprobs": {"token_logprobs": logprobs},
            "weight_versions": [
                {"version": self._version - 1, "start": 0, "end": half},
                {"version": self._version, "start": half, "end": len(output)},
            ],
        }
        self.spoil(choice)
        return choice
