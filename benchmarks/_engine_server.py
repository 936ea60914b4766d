"""A running vLLM with our plugin and the benchmark's worker extension."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from stitch.engines.control import ControlClient
from stitch.engines.launch import EngineProcess, free_port
from stitch.engines.plugin_launch import plugin_environment
from stitch.engines.vllm.launch import vllm_command
from stitch.errors import EngineError
from stitch.types import Schema

ROOT = Path(__file__).parents[1]
EXTENSION = "benchmarks._engine_worker.BenchmarkWorkerExtension"
ARGS = ("--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "8")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, for the benchmark's own worker methods
}

GREEDY = {"model": "benchmark", "temperature": 0, "ignore_eos": True}


class Server:
    """What a running engine is asked, by its URL."""

    def __init__(self, url: str, client: ControlClient, session: aiohttp.ClientSession) -> None:
        self.url, self.client = url, client
        self._session = session

    async def worker(self, method: str, *args: object) -> Any:
        """The only worker's answer for a method of the benchmark's extension."""
        body = {"method": method, "args": list(args)}
        async with self._session.post(f"{self.url}/collective_rpc", json=body) as answer:
            found = await answer.json()
            if answer.status != 200:
                raise EngineError(f"{method}: {found}")
            (result,) = found["results"]
            return result

    async def complete(self, prompt: list[int], **more: Any) -> tuple[int, Any]:
        """(status, body) of a completion."""
        async with self._session.post(
            f"{self.url}/v1/completions", json={**GREEDY, "prompt": prompt, **more}
        ) as answer:
            return answer.status, await answer.json(content_type=None)

    async def stream(self, prompt: list[int], num_tokens: int) -> AsyncIterator[list[int]]:
        """The token ids of a streamed completion, as they come."""
        body = {**GREEDY, "prompt": prompt, "max_tokens": num_tokens, "stream": True}
        body |= {"return_token_ids": True}
        async with self._session.post(f"{self.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise EngineError(f"{answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:]).get("choices", []):
                        yield choice["token_ids"] or []


@contextlib.asynccontextmanager
async def serving(python: str, model: Path, schema: Schema, log: Path) -> AsyncIterator[Server]:
    """Start vLLM on `model`; what it prints goes to `log`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = vllm_command(
        model,
        port=port,
        python=python,
        served_model_name="benchmark",
        args=[*ARGS, "--worker-extension-cls", EXTENSION],
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    engine = await EngineProcess.start(
        command,
        base_url=url,
        env={**ENVIRONMENT, **plugin_environment(), "PYTHONPATH": path},
        ready_timeout_s=900.0,
        log_path=log,
    )
    client = ControlClient(url, engine.token, schema=schema, timeout_s=600.0)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=180)) as session:
            yield Server(url, client, session)
    finally:
        await client.close()
        await engine.stop(grace_s=20.0)
