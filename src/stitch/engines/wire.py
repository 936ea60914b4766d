"""JSON of the control interface: one place that both the client and the routes use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stitch import errors
from stitch.engines.port import CommitReceipt, EngineDescription, VerifyReport
from stitch.errors import StitchError, UsageError
from stitch.types import VersionRef

PREFIX = "/stitch/v1"
TOKEN_ENV = "STITCH_ENGINE_TOKEN"
VIEW_ENV = "STITCH_ENGINE_VIEW"
"""The run's view, for engines that have no argument for it."""


def ref_to_json(ref: VersionRef | None) -> dict[str, object] | None:
    return None if ref is None else {"run": ref.run, "version": ref.version}


def ref_from_json(value: object, what: str) -> VersionRef:
    """`{"run": str, "version": int}`; raises UsageError naming `what`."""
    if not isinstance(value, dict) or set(value) != {"run", "version"}:
        raise UsageError(f'{what} must be {{"run": NAME, "version": N}}, got {value!r:.200}')
    return VersionRef(value["run"], value["version"])


def text_field(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        raise UsageError(f"{key!r} must be a text of 1 to 200 characters, got {value!r:.200}")
    return value


def count_field(body: Mapping[str, Any], key: str) -> int:
    value = body.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{key!r} must be a non-negative integer, got {value!r:.200}")
    return value


def names_field(body: Mapping[str, Any], key: str) -> list[str] | None:
    """A list of names; None if there is none."""
    value = body.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(it, str) for it in value):
        raise UsageError(f"{key!r} must be a list of one or more names, got {value!r:.200}")
    return value


def object_from(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object, or UsageError."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise UsageError(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{what} must be a JSON object, got {value!r:.200}")
    return value


def description_to_json(it: EngineDescription) -> dict[str, object]:
    return {
        "engine": it.engine,
        "boot": it.boot,
        "ref": ref_to_json(it.ref),
        "schema_digest": it.schema_digest,
        "state": it.state,
        "staged": it.staged,
        "staged_target": ref_to_json(it.staged_target),
        "committed": it.committed,
        "stamps_versions": it.stamps_versions,
        "salt_field": it.salt_field,
        "blocked_routes": list(it.blocked_routes),
        "fixed_tensors": list(it.fixed_tensors),
    }


def description_from_json(body: Mapping[str, Any]) -> EngineDescription:
    return EngineDescription(
        engine=body["engine"],
        boot=body["boot"],
        ref=_optional_ref(body["ref"]),
        schema_digest=body["schema_digest"],
        state=body["state"],
        staged=body["staged"],
        staged_target=_optional_ref(body["staged_target"]),
        committed=body.get("committed"),
        stamps_versions=bool(body["stamps_versions"]),
        salt_field=body["salt_field"],
        blocked_routes=tuple(body["blocked_routes"]),
        fixed_tensors=tuple(body.get("fixed_tensors", ())),
    )


def receipt_to_json(it: CommitReceipt) -> dict[str, object]:
    return {"ref": ref_to_json(it.ref), "pause_ms": it.pause_ms, "num_changed": it.num_changed}


def receipt_from_json(body: Mapping[str, Any]) -> CommitReceipt:
    return CommitReceipt(
        ref=ref_from_json(body["ref"], "ref"),
        pause_ms=float(body["pause_ms"]),
        num_changed=int(body["num_changed"]),
    )


def report_to_json(it: VerifyReport) -> dict[str, object]:
    return {
        "ref": ref_to_json(it.ref),
        "digest": it.digest,
        "tensors": dict(it.tensors),
        "seconds_s": it.seconds_s,
    }


def report_from_json(body: Mapping[str, Any]) -> VerifyReport:
    return VerifyReport(
        ref=_optional_ref(body["ref"]),
        digest=body["digest"],
        tensors=dict(body["tensors"]),
        seconds_s=float(body["seconds_s"]),
    )


def error_to_json(error: StitchError) -> dict[str, object]:
    return {"error": {"type": type(error).__name__, "message": str(error)}}


def error_from_json(body: object, status: int) -> StitchError:
    """The error that an engine reported.

    EngineUnreachableError when it is not one of ours: then something else than the control
    interface answered (a server that is still starting, say), and what the call did is not known.
    """
    detail = body.get("error") if isinstance(body, dict) else None
    if not isinstance(detail, dict):
        return errors.EngineUnreachableError(f"the engine answered {status}: {body!r:.300}")
    if status == 401:
        return UsageError(f"the engine refused our control token: {detail.get('message')}")
    kind = getattr(errors, str(detail.get("type")), None)
    if not (isinstance(kind, type) and issubclass(kind, StitchError)):
        return errors.EngineUnreachableError(f"the engine answered {status}: {detail!r:.300}")
    return kind(str(detail.get("message", f"the engine answered {status}")))


def _optional_ref(value: object) -> VersionRef | None:
    return None if value is None else ref_from_json(value, "ref")
