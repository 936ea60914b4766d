"""The answers that a replica gives itself: errors in one JSON shape, and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping

from aiohttp import web

from stitch.replica.gate import NotAdmittedError
from stitch.replica.state import ReplicaStatus
from stitch.types import VersionConstraint, VersionRef


def json_answer(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    body = json.dumps(value, separators=(",", ":")).encode()
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def error_answer(
    status: int,
    kind: str,
    message: str,
    *,
    headers: Mapping[str, str] | None = None,
    **details: object,
) -> web.Response:
    """`{"error": {"type": kind, "message": message, ...details}}`."""
    error = {"type": kind, "message": message, "code": status, **details}
    return json_answer({"error": error}, status=status, headers=headers)


def refusal_answer(
    refused: NotAdmittedError, constraint: VersionConstraint, status: ReplicaStatus
) -> web.Response:
    """409 for an unmet constraint, 503 where there is nothing to admit to."""
    retry = {"Retry-After": str(refused.retry_after_s)}
    now = {
        "applied": status.applied if status.caught_up else None,
        "newest": status.newest,
        "run": status.run,
        "state": status.state.value,
    }
    if refused.reason is None:
        return error_answer(503, "ReplicaNotReady", str(refused), headers=retry, **now)
    return error_answer(
        409,
        "WeightVersionNotReady",
        str(refused),
        headers=retry,
        reason=refused.reason.value,
        target_version=constraint.target,
        target_run=constraint.run,
        **now,
    )


def broken_start_answer(
    start: VersionRef, constraint: VersionConstraint, status: ReplicaStatus
) -> web.Response:
    """409 for an answer that the engine began on another version than the one demanded."""
    reason = constraint.unmet_by(start.version, start.run)
    assert reason is not None
    return error_answer(
        409,
        "WeightVersionNotReady",
        f"the engine began this answer on {start}; {constraint} was demanded",
        headers={"Retry-After": "1"},
        reason=reason.value,
        target_version=constraint.target,
        target_run=constraint.run,
        applied=status.applied,
        newest=status.newest,
        run=status.run,
        state=status.state.value,
    )
