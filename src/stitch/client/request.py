"""A request before it is sent, and the ways in which one attempt at it can fail."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stitch.client.settings import positive
from stitch.errors import ConstraintError, UsageError
from stitch.types import VersionConstraint, check_run_name, check_version

MIN_HEADER = "X-Stitch-Min-Version"
EXACT_HEADER = "X-Stitch-Exact-Version"
RUN_HEADER = "X-Stitch-Run"
LONGEST_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """A POST of JSON to an engine's route, with what it demands of the weights."""

    path: str
    body: Mapping[str, Any]
    constraint: VersionConstraint = field(default_factory=VersionConstraint)
    deadline_s: float
    idempotent: bool = True

    @property
    def headers(self) -> dict[str, str]:
        """The constraint as headers, unless the body carries it."""
        found = {} if self.constraint.run is None else {RUN_HEADER: self.constraint.run}
        if "weight_version" in self.body or self.constraint.target is None:
            return found
        name = MIN_HEADER if self.constraint.min_version is not None else EXACT_HEADER
        return {**found, name: str(self.constraint.target)}


def make_request(
    path: str,
    body: Mapping[str, Any],
    *,
    min_version: int | None,
    exact_version: int | None,
    run: str | None = None,
    deadline_s: float,
    idempotent: bool,
) -> Request:
    """Check the arguments of a call. Raises UsageError or ConstraintError."""
    if not path.startswith("/"):
        raise UsageError(f"the path must start with '/', got {path!r}")
    if not isinstance(body, Mapping):
        raise UsageError(f"the body must be a mapping, got {type(body).__name__}")
    if min_version is not None and exact_version is not None:
        raise ConstraintError("give min_version or exact_version, not both")
    for name, value in (("min_version", min_version), ("exact_version", exact_version)):
        if value is not None:
            check_version(value, name)
    if run is not None:
        check_run_name(run)
    constraint = VersionConstraint(min_version=min_version, exact_version=exact_version, run=run)
    if "weight_version" in body:
        if constraint.target is not None:
            raise ConstraintError(
                "the version constraint is given twice: in the body and beside it"
            )
        constraint = VersionConstraint.parse(body["weight_version"])
        if run is not None and constraint.run not in (None, run):
            raise ConstraintError(f"the body demands run {constraint.run!r}, the call {run!r}")
        constraint = replace(constraint, run=constraint.run or run)
    return Request(
        path=path,
        body=body,
        constraint=constraint,
        deadline_s=positive(deadline_s, "deadline_s"),
        idempotent=idempotent,
    )


class AttemptFailed(Exception):
    """One attempt brought no answer; another may. Never leaves the client."""

    def __init__(
        self,
        what: str,
        *,
        retry_after_s: float | None = None,
        unmet: bool = False,
        may_have_run: bool = False,
        answered_error: bool = False,
        timed_out: bool = False,
    ) -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s
        self.unmet = unmet
        """The replica is fine, only not on the wanted version."""
        self.may_have_run = may_have_run
        """The engine may have begun the work; sending it again may do it twice."""
        self.answered_error = answered_error
        """The engine itself answered with a 5xx: the request may be what breaks it."""
        self.timed_out = timed_out
        """Nothing came in time, so what was said before tells more."""


def parse_retry_after(text: str | None) -> float | None:
    """Seconds of a Retry-After header (a number or an HTTP date), capped; None if absent or odd."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except ValueError:
            return None
    if seconds != seconds:
        return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S)
