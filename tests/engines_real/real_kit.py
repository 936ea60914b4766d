"""Starting real engines and talking to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from real_models import difference, load

from stitch.codec import DigestState
from stitch.engines.control import ControlClient
from stitch.engines.launch import free_port, new_token
from stitch.engines.plugin_launch import plugin_environment
from stitch.engines.sglang.launch import sglang_command
from stitch.engines.vllm.launch import vllm_command
from stitch.engines.wire import PREFIX, TOKEN_ENV
from stitch.tensors import HostWeights
from stitch.testing.engine_contract import BASE, Subject
from stitch.types import VersionRef

START_S = 600.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class RealEngine:
    """One running engine with the plugin. `stop` it; it dies with this process in any case."""

    name: ClassVar[str]
    """As `stitch serve --engine` has it."""
    command: ClassVar[Callable[..., list[str]]]
    args: ClassVar[tuple[str, ...]]
    env: ClassVar[Mapping[str, str]]
    core: ClassVar[str]
    """What the name of its first process with weights begins with."""
    control: ClassVar[tuple[str, ...]]
    """Some of its own control routes."""

    @classmethod
    def python(cls) -> str:
        return os.environ[f"STITCH_{cls.name.upper()}_PYTHON"]

    @classmethod
    def on_ranks(cls, tp: int) -> tuple[tuple[str, ...], dict[str, str]]:
        """Arguments and environment for `tp` ranks."""
        raise NotImplementedError

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        tp: int = 1,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.model, self.log = model, log
        self.token = new_token()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        ranks, environment = self.on_ranks(tp)
        command = type(self).command(
            model,
            port=port,
            served_model_name="tiny",
            python=self.python(),
            args=[*self.args, *ranks, *args],
        )
        tether = [sys.executable, "-m", "stitch.engines.tether", str(os.getpid()), "--"]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*tether, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    **QUIET,
                    **self.env,
                    **environment,
                    **plugin_environment(),
                    **(env or {}),
                    TOKEN_ENV: self.token,
                },
            )
        self.last: HostWeights = load(model)
        """What the latest test believes that the engine holds."""
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        deadline_s = time.monotonic() + START_S
        request = urllib.request.Request(
            f"{self.url}{PREFIX}/describe", headers={"Authorization": f"Bearer {self.token}"}
        )
        while True:
            try:
                with urllib.request.urlopen(request, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                assert self.process.poll() is None, f"{self.name} ended:\n{self.tail()}"
                assert time.monotonic() < deadline_s, f"{self.name} is not ready:\n{self.tail()}"
                time.sleep(0.2)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def health(self) -> int:
        """What a probe with a short patience sees."""
        with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return int(answer.status)

    def client(self) -> ControlClient:
        return ControlClient(self.url, self.token, schema=self.last.schema, timeout_s=120)

    def tokens(self, prompt: Sequence[int], num_tokens: int = 24, **more: Any) -> list[int]:
        """Greedy tokens for a prompt of token ids."""
        body = greedy(prompt, num_tokens, **more)
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return found

    async def fresh(self) -> Subject:
        """A subject that holds the checkpoint's weights, whatever the test before left."""
        client, base = self.client(), load(self.model)
        wanted = digest_of(base)
        held = (await client.verify()).digest
        if held == digest_of(self.last) != wanted:
            label = VersionRef("restoring", 0)
            await client.bind(label, held)
            await client.stage("back", label, BASE, difference(base, self.last))
            await client.commit("back")
            held = (await client.verify()).digest
        elif held != wanted:  # a test that did not keep account of its only commit
            await client.roll_back(BASE)
            held = (await client.verify()).digest
        assert held == wanted
        self.last = base
        return Subject(engine=client, weights=base, url=self.url)


class RealVllm(RealEngine):
    name = "vllm"
    command = vllm_command
    args = ("--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "16")
    env: ClassVar[Mapping[str, str]] = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    core = "VLLM::EngineCor"
    control = ("/pause", "/collective_rpc")

    @classmethod
    def on_ranks(cls, tp: int) -> tuple[tuple[str, ...], dict[str, str]]:
        if tp == 1:
            return (), {}
        return ("--tensor-parallel-size", str(tp)), {"VLLM_CPU_OMP_THREADS_BIND": cores(tp)}


class RealSglang(RealEngine):
    name = "sglang"
    command = sglang_command
    args = (
        *("--device", "cpu", "--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch", "--mem-fraction-static", "0.9"),
        *("--max-total-tokens", "8192", "--context-length", "512"),
        *("--max-running-requests", "8", "--disable-overlap-schedule", "--sleep-on-idle"),
    )
    """Schedulers that have nothing to do would take all cores, and slow down others' starts."""
    env: ClassVar[Mapping[str, str]] = {"SGLANG_USE_CPU_ENGINE": "1"}
    core = "sglang::schedul"
    control = ("/pause_generation", "/flush_cache", "/update_weights_from_disk", "/open_session")

    @classmethod
    def on_ranks(cls, tp: int) -> tuple[tuple[str, ...], dict[str, str]]:
        if tp == 1:
            return (), {}
        return ("--tp-size", str(tp)), {"SGLANG_CPU_OMP_THREADS_BIND": cores(tp)}


def greedy(prompt: Sequence[int], num_tokens: int, /, **more: Any) -> dict[str, Any]:
    """The body of a request for so many greedy tokens after a prompt of token ids.

    `more` goes over it, a prompt of another shape included.
    """
    return {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def cores(count: int) -> str:
    """One core a rank."""
    return "|".join(str(core) for core in sorted(os.sched_getaffinity(0))[:count])


def digest_of(weights: HostWeights) -> str:
    return DigestState.of(weights).version_digest()


PROMPTS = ([5, 17, 200, 31], [100, 7], [250, 251, 252, 3, 4, 5])


def wait_for_the_end_of(processes: Sequence[int]) -> None:
    """Fail unless all of them are gone within a minute."""
    deadline_s = time.monotonic() + 60
    while left := [pid for pid in processes if is_running(pid)]:
        assert time.monotonic() < deadline_s, f"processes {left} are left"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def name_of(pid: int) -> str:
    """The process's name, as it gave it to the kernel."""
    return Path(f"/proc/{pid}/comm").read_text().strip()
