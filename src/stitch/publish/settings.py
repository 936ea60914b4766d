"""What may be chosen about a publisher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from stitch.codec.choice import Decode, check_choice
from stitch.errors import UsageError
from stitch.publish.anchoring import AnchorEvery
from stitch.publish.retry import RetryPolicy

WhenBusy = Literal["coalesce", "block"]
SnapshotMode = Literal["host", "device"]


@dataclass(frozen=True, kw_only=True)
class PublisherSettings:
    """The keyword arguments that Publisher.start, resume and open share."""

    when_busy: WhenBusy = "coalesce"
    """`publish` while the one before is still under way: the newest waits, or the caller does."""
    snapshot: SnapshotMode = "host"
    """What `publish` copies to the host: every tensor whole, or ("device") only what changed since
    the snapshot before, found where the tensors live. That needs room for the view there once
    more, and host memory for an eighth of it. The first two snapshots are still whole copies."""
    encoding: str = "auto"
    """How changes are encoded; "auto": each bucket by the encoding that is likely the smallest."""
    decode: Decode = "any"
    """What decoding may read of the old weights: any words, or ("changed") only those that change,
    for replicas that keep no host copy. Patches then hold `gaps` only and are nearly twice as
    large."""
    anchor_every: AnchorEvery = "auto"
    """Store every n-th version whole, too; "auto": where the patches since the last anchor, or the
    base, cost a reader more bytes than the whole. Anchors are written beside publishing; while one
    is, the view may be held once more, and what comes due is left out."""
    merge: bool = False
    """Write merged patches, for replicas that are far behind, beside publishing. That needs host
    memory for the view twice; `stitch compact` does the same in another process."""
    threads: int | None = None
    """Threads that compare and encode; None: as many as there are CPUs, at most 8."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """For each store operation."""
    scratch: Path | None = None
    """Where anchors are put together; None: the system's temporary directory."""

    def __post_init__(self) -> None:
        if self.when_busy not in ("coalesce", "block"):
            raise UsageError(f"when_busy must be 'coalesce' or 'block', got {self.when_busy!r}")
        if self.snapshot not in ("host", "device"):
            raise UsageError(f"snapshot must be 'host' or 'device', got {self.snapshot!r}")
        check_choice(self.encoding, self.decode)
        for name, words in (("anchor_every", ("auto", None)), ("threads", (None,))):
            value = getattr(self, name)
            if value not in words and (not isinstance(value, int) or value < 1):
                others = ", ".join(map(repr, words))
                raise UsageError(f"{name} must be a positive integer or {others}, got {value!r}")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> PublisherSettings:
        """From keyword arguments; an unknown one raises UsageError naming those there are."""
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(options.keys() - known):
            raise UsageError(f"unknown publisher options {unknown}; there are {sorted(known)}")
        return cls(**options)
