"""Every error that Stitch raises on purpose, sorted by what the caller does next.

- :class:`RetryableError`: try again, later or elsewhere; nothing is damaged.
- :class:`UsageError`: fix the call, the file or the configuration; trying again changes nothing.
- :class:`FatalError`: this process can no longer do its work; replace it.

A message says what was found, what was wanted, and which tensor, key or version it concerns.
"""

from __future__ import annotations


class StitchError(Exception):
    """Base of all errors below."""


class RetryableError(StitchError):
    """Trying again later, or elsewhere, may succeed."""


class UsageError(StitchError, ValueError):
    """The call, the file or the configuration must change."""


class FatalError(StitchError):
    """The process that raised this must be replaced or restarted."""


# --- tensors and checkpoints -------------------------------------------------------------------


class UnsupportedDtypeError(UsageError):
    """A dtype that the operation cannot handle."""


class CorruptCheckpointError(UsageError):
    """A safetensors file, its header or a sharded index is malformed or truncated."""


class SchemaMismatchError(UsageError):
    """Tensors are unknown, missing, renamed, duplicated or reshaped; the message lists them."""


# --- codec -------------------------------------------------------------------------------------


class CorruptPatchError(UsageError):
    """Patch bytes are truncated, altered or inconsistent; the message names the bucket."""


class UnsupportedFormatError(UsageError):
    """A format version or an encoding that this release does not know."""


class BaseMismatchError(UsageError):
    """The weights are not the ones that a patch or a run starts from."""


# --- board -------------------------------------------------------------------------------------


class CorruptRecordError(UsageError):
    """A JSON record on the board is malformed; the message names key and field."""


class UntrustedRecordError(CorruptRecordError):
    """A record on the board carries no valid signature by a key that is trusted."""


class RunNotFoundError(UsageError):
    """The board has no such run."""


class RunExistsError(UsageError):
    """The board already has a run of this name."""


class VersionNotFoundError(UsageError):
    """The run has no such version."""


class VersionRemovedError(VersionNotFoundError):
    """The version was published, but retention has removed what leads to it."""


class CopyConflictError(UsageError):
    """Two boards hold different records under one key; nothing was overwritten."""


class StoreUnsuitableError(UsageError):
    """The store lacks a property that the board depends on, or refuses access."""


class StoreError(RetryableError):
    """The store could not do its work this time."""


class StoreFullError(StoreError):
    """No space is left where the board or a cache lives."""


class CorruptBlobError(RetryableError):
    """A fetched blob is not the one its manifest names (length or BLAKE3)."""


class NoRouteError(RetryableError):
    """No sequence of patches and anchors leads to the wanted version."""


# --- publisher ---------------------------------------------------------------------------------


class FatalPublisherError(FatalError):
    """This publisher cannot continue its run; resume with a new one."""


class PublishConflictError(FatalPublisherError):
    """Another writer published this version number."""


class StaleEpochError(FatalPublisherError):
    """A newer epoch began: another publisher owns the board now."""


class LineageError(FatalPublisherError):
    """The board cannot reproduce the run's newest version, so nothing may be built on it."""


class PublisherClosedError(UsageError):
    """The publisher was closed, or failed for good earlier."""


# --- engines and replicas ----------------------------------------------------------------------


class EngineError(RetryableError):
    """The engine refused or failed an operation and still serves its old version."""


class EngineUnreachableError(RetryableError):
    """The engine did not answer; whether the operation happened is not known."""


class FatalReplicaError(FatalError):
    """What the engine serves is in doubt, or it is gone; the replica must be replaced."""


# --- clients -----------------------------------------------------------------------------------


class ConstraintError(UsageError):
    """A weight-version constraint in a request is malformed."""


class NoReplicaError(RetryableError):
    """No replica met the request's constraint before its deadline."""


class StreamBrokenError(RetryableError):
    """A stream ended early, after output had been seen; what was received stands."""


class RequestFailedError(UsageError):
    """The engine rejected the request; the message carries status and body."""

    def __init__(self, message: str, *, status: int | None = None, body: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = body
