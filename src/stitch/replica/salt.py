"""Prefix-cache separation: every generation runs in a cache namespace of its run and version.

Keys and values that an engine cached under older weights must never serve a newer version, so the
proxy adds a salt to each generation request (vLLM `cache_salt`, SGLang `extra_key`). A salt the
user sent keeps its effect: ours is appended to it, so that namespaces the user keeps apart stay
apart and versions are separated within each.
"""

from __future__ import annotations

import functools
import hashlib

from stitch.replica.body import RequestBody, dump_json, splice_members
from stitch.types import VersionRef

MAX_SALT_CHARS = 128
"""vLLM refuses longer ones, and any of `@ / \\` and NUL."""

GENERATE_SEGMENTS = frozenset({"completions", "responses", "messages", "generate", "batch"})
"""Last path segments of the routes that generate, in vLLM, SGLang and the embedded engine."""


@functools.lru_cache(maxsize=64)
def version_salt(ref: VersionRef) -> str:
    """The namespace of one version: run and version, at most 60 characters."""
    run = ref.run
    if len(run) > 40:
        run = hashlib.blake2b(run.encode(), digest_size=16).hexdigest()
    return f"stitch.{run}.{ref.version}"


def salted(body: RequestBody, field: str, ref: VersionRef) -> bytes:
    """The bytes to forward: `body` with the salt of `ref` in its `field`."""
    if not body.is_object:
        return body.data
    salt = version_salt(ref)
    if body.user_salt is None:
        spliced = splice_members(body.data, f'"{field}":"{salt}"'.encode())
        return body.data if spliced is None else spliced
    assert body.parsed is not None
    return dump_json({**body.parsed, field: _joined(body.user_salt, salt)})


def _joined(user: object, salt: str) -> object:
    if isinstance(user, list):  # SGLang: one key per prompt of a batch
        return [_joined(one, salt) for one in user]
    if not isinstance(user, str):
        return salt if user is None else user  # a wrong type is the engine's to refuse
    joined = f"{user}.{salt}"
    if len(joined) <= MAX_SALT_CHARS:
        return joined
    return f"{hashlib.blake2b(user.encode('utf-8', 'replace'), digest_size=16).hexdigest()}.{salt}"
