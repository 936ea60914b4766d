"""Settings of a replica; see stitch.config for how file, environment and flags combine."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stitch.config import setting
from stitch.errors import UsageError
from stitch.types import BLOB_NAME, check_run_name, is_http_address

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """What `stitch serve` needs to know."""

    board: str = setting(help="the board: a directory or URL")
    model: Path = setting(  # noqa: RUF009 - a dataclass field, as in stitch.config
        help="checkpoint directory of the run's base, which the engine loads"
    )
    run: str | None = setting(None, help="run to follow (default: the board's current one)")
    replica_id: str | None = setting(None, help="name on the board (default: HOST-PORT)")
    region: str = setting("", help="region, shown in heartbeats")
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(8000, help="port to listen on; 0 takes a free one")
    url: str | None = setting(None, help="address that clients reach it at (default: HOST:PORT)")

    engine: Literal["embedded", "vllm", "sglang", "attach"] = setting(
        "embedded", help="engine to start (embedded, vllm or sglang), or attach to a running one"
    )
    engine_mode: Literal["plugin", "reload"] = setting(
        "plugin",
        help="how vllm and sglang change their weights: in place, by our plugin, or stock engines "
        "by reloading a checkpoint (slower: see docs/engines.md)",
    )
    engine_dir: Path | None = setting(  # noqa: RUF009 - a dataclass field, as in stitch.config
        None,
        help="reload: directory for the engine's checkpoints, with room for two; it is filled and "
        "emptied",
    )
    engine_python: Path | None = setting(  # noqa: RUF009 - a dataclass field, as in stitch.config
        None,
        help="interpreter of the environment that the engine is installed in (default: this one)",
    )
    engine_args: tuple[str, ...] = setting((), help="the engine's own arguments, passed on")
    engine_url: str | None = setting(None, help="address of the engine to attach to")
    engine_token: str | None = setting(None, help="its control token", secret=True)
    engine_port: int = setting(0, help="port of a started engine; 0 takes a free one")
    served_model_name: str | None = setting(None, help="model name in a started engine's API")
    dtype: str = setting(
        "auto", help="what the embedded engine computes in: bfloat16, float32, or the faster one"
    )
    device: str = setting("cpu", help="device of the embedded engine")
    max_slots: int = setting(16, help="requests that the embedded engine runs together")
    max_len: int = setting(512, help="longest prompt and answer of the embedded engine, in tokens")
    threads: int = setting(1, help="compute threads of the embedded engine and of decoding")

    trusted_keys: tuple[Path, ...] | None = setting(
        None,
        help="files of public keys (PEM); only what one of them signed is taken from the board",
    )

    poll_interval_s: float = setting(1.0, help="seconds between looks at the board")
    heartbeat_interval_s: float = setting(5.0, help="seconds between heartbeats")
    max_lag: int | None = setting(
        8, help="versions behind the newest at which it stops being ready; negative: no limit"
    )
    gate_wait_s: float = setting(30.0, help="longest wait of a request for a commit to end")
    max_body_bytes: int = setting(256 * MIB, help="largest request body")
    drain_s: float = setting(10.0, help="time for requests to end when it stops")
    admin_token: str | None = setting(
        None, help="bearer token for POST /verify from other machines", secret=True
    )
    engine_start_timeout_s: float = setting(900.0, help="time for the engine to start")
    engine_timeout_s: float = setting(600.0, help="time for one control call to the engine")
    engine_down_budget_s: float = setting(
        60.0, help="time without an answer after which the engine counts as lost"
    )
    commit_resolve_s: float = setting(
        120.0, help="time to find out whether a commit with a lost reply happened"
    )
    watchdog_interval_s: float = setting(2.0, help="seconds between looks at the engine")
    proof_interval_s: float = setting(
        5.0, help="least seconds between background proofs of some live tensors; 0: none"
    )
    max_backoff_s: float = setting(30.0, help="longest wait between attempts after a fault")
    scratch: Path | None = setting(  # noqa: RUF009 - a dataclass field, as in stitch.config
        None, help="directory for anchors on their way (default: the system's)"
    )
    cache: Path | None = setting(  # noqa: RUF009 - a dataclass field, as in stitch.config
        None, help="directory of this user where the replicas of one host share what they fetch"
    )
    cache_max_bytes: int = setting(64 * 1024 * MIB, help="space that the cache may take")

    def __post_init__(self) -> None:
        if self.run is not None:
            check_run_name(self.run)
        if self.replica_id is not None and not BLOB_NAME.fullmatch(self.replica_id):
            raise UsageError(f"replica_id {self.replica_id!r} may hold letters, digits and '._-'")
        if self.url is not None and not is_http_address(self.url):
            raise UsageError(f"url must be a plain http(s) address, got {self.url!r:.200}")
        if self.url is None and self.host in ("0.0.0.0", "::"):
            raise UsageError(
                f"host {self.host} is every address of this machine; give `--url`, the one that "
                "clients reach it at"
            )
        if self.engine == "attach" and not (self.engine_url and self.engine_token):
            raise UsageError("engine 'attach' needs engine_url and engine_token (the environment)")
        if (self.engine == "attach" or self.reloads) and self.engine_url and self.engine_args:
            raise UsageError("an engine that runs already takes no arguments")
        self._check_mode()
        if self.cache_max_bytes < 1:
            raise UsageError(f"cache_max_bytes must be above 0, got {self.cache_max_bytes}")
        if self.proof_interval_s < 0:
            raise UsageError(f"proof_interval_s must not be negative, got {self.proof_interval_s}")
        for name in ("poll_interval_s", "heartbeat_interval_s", "watchdog_interval_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be above 0, got {getattr(self, name)}")

    def _check_mode(self) -> None:
        if self.reloads and self.engine not in ("vllm", "sglang"):
            raise UsageError(
                f"engine_mode 'reload' is for stock engines: say which, --engine vllm or sglang, "
                f"not {self.engine!r}"
            )
        if self.reloads and self.engine_dir is None:
            raise UsageError(
                "engine_mode 'reload' needs engine_dir, a directory with room for two checkpoints"
            )
        if self.engine_url and self.engine != "attach" and not self.reloads:
            raise UsageError(
                f"engine_url is of an engine that runs already, engine {self.engine!r} starts one: "
                "give one of them (or both, for a stock engine, with engine_mode 'reload')"
            )

    @property
    def reloads(self) -> bool:
        return self.engine_mode == "reload"

    @property
    def lag_limit(self) -> int | None:
        return None if self.max_lag is None or self.max_lag < 0 else self.max_lag

    def name_at(self, port: int) -> str:
        """The id under which the replica listening on `port` is known on the board."""
        if self.replica_id is not None:
            return self.replica_id
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()).strip(".-") or "replica"
        return f"{host}-{port}"

    def url_at(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.url or f"http://{host}:{port}"
