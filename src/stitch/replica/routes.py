"""Which requests reach the engine: everything but its weight and lifecycle control routes.

A target is compared after the most lenient reading an engine could give it: percent-decoded until
nothing changes, lower case, slashes collapsed, parameters dropped. Dot segments have more than one
reading and are not forwarded at all.
"""

from __future__ import annotations

import enum
import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote, urlsplit

from stitch.replica.salt import GENERATE_SEGMENTS

BLOCKED_PREFIXES = ("/stitch", "/wsync")
"""Control interfaces: whole subtrees."""

BLOCKED_PATHS = frozenset({
    # vLLM: weights, pause, caches, lifecycle
    "/pause", "/resume", "/is_paused", "/abort_requests", "/collective_rpc", "/get_world_size",
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/sleep", "/wake_up",
    "/is_sleeping", "/release_kv_cache_memory", "/scale_elastic_ep", "/is_scaling_elastic_ep",
    "/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/start_profile", "/stop_profile",
    # SGLang
    "/pause_generation", "/continue_generation", "/flush_cache", "/abort_request",
    "/release_memory_occupation", "/resume_memory_occupation", "/get_server_info",
    "/configure_logging", "/slow_down", "/set_internal_state", "/clear_hicache_storage_backend",
    "/attach_hicache_storage_backend", "/detach_hicache_storage_backend", "/freeze_gc",
    "/load_lora_adapter_from_tensors", "/set_trace_level", "/dumper", "/pull_weights",
    # either
    "/load_model", "/reset", "/shutdown",
})  # fmt: skip
"""Control routes of vLLM and SGLang that do not have 'weight' in their name."""


class RouteKind(enum.Enum):
    OWN = "own"
    BLOCKED = "blocked"
    FORWARD = "forward"


@dataclass(frozen=True, slots=True)
class Route:
    """What to do with a request. `target`: what the engine is asked; `generates`: takes a salt."""

    kind: RouteKind
    path: str
    target: str
    generates: bool


class RouteTable:
    """Decides for request targets; remembers its last answers, as clients repeat themselves."""

    def __init__(self, own: Iterable[str], blocked: Iterable[str] = ()) -> None:
        self._own = frozenset(own)
        paths = {normal_path(p.rstrip("*")): p.endswith(("/", "*")) for p in blocked}
        self._blocked = BLOCKED_PATHS | paths.keys()
        self._prefixes = BLOCKED_PREFIXES + tuple(p for p, tree in paths.items() if tree)
        self.route: Callable[[str], Route] = lru_cache(maxsize=1024)(self._route)

    def _route(self, target: str) -> Route:
        raw = origin_form(target)
        path = normal_path(raw)
        kind = RouteKind.FORWARD
        if raw.partition("?")[0] in self._own:
            kind = RouteKind.OWN
        elif has_dot_segments(raw) or self._is_blocked(path):
            kind = RouteKind.BLOCKED
        return Route(kind, path, raw, posixpath.basename(path) in GENERATE_SEGMENTS)

    def _is_blocked(self, path: str) -> bool:
        if path in self._blocked or path in self._own:  # ours, oddly spelled: not the engine's
            return True
        if any(path == p or path.startswith(p + "/") for p in self._prefixes):
            return True
        # /update_weights_from_disk, /weights_checker, /v1/update_weights ...: every engine's
        # weight routes say so in their first segments.
        return any("weight" in part for part in path.split("/")[1:3])


def origin_form(target: str) -> str:
    """Path and query of a request target (which may be absolute, as sent to a proxy)."""
    if not target.startswith("/"):
        parts = urlsplit(target)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not target.startswith("/"):
            target = "/" + target
    return target.partition("#")[0]


def normal_path(target: str) -> str:
    """The path of `target` under the most lenient reading (see the module's first lines)."""
    path = _decoded_path(target).partition("?")[0]
    return posixpath.normpath("/" + path.lstrip("/")).replace("//", "/")


def has_dot_segments(target: str) -> bool:
    """Whether any reading of the path has `.` or `..` segments.

    Some engines resolve them and others take them as names, so `/a/../b` may lead to the routes
    below `/a` or to `/b`. Honest clients resolve them before they ask.
    """
    return any(part in (".", "..") for part in re.split(r"[/?]", _decoded_path(target)))


def _decoded_path(target: str) -> str:
    path = target.partition("?")[0]
    for _ in range(8):
        decoded = unquote(path, errors="replace")
        if decoded == path:
            break
        path = decoded
    path = path.replace("\\", "/").lower()
    path = "".join(ch for ch in path if ch > " " and ch != "\x7f")
    return re.sub(r";[^/]*", "", path)
