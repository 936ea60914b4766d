"""From obstore's and the system's errors to ours, without leaking what they carry.

obstore's messages hold addresses, answers of servers and dumps of its settings. Nothing of that is
passed on but words from the fixed lists below: the HTTP status, the store's own error code, and
what broke on the way.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from stitch.errors import CorruptRecordError, StoreError, StoreFullError, StoreUnsuitableError

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_HTTP_STATUS = re.compile(
    r"\b(?:status|Server returned non-2xx status code:?)\D{0,20}([345]\d\d)\b"
)
_CODE = re.compile(r"<Code>\s*([A-Za-z]{3,40})\s*</Code>|x-ms-error-code: ([A-Za-z]{3,40})")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_UNSUITABLE = (
    PermissionError,
    PermissionDeniedError,
    UnauthenticatedError,
    NotSupportedError,
    InvalidPathError,
    UnknownConfigurationKeyError,
)

_FULL_STATUS = frozenset({507})
_UNSUITABLE_STATUS = frozenset({301, 401, 403, 405, 501})

_FULL_CODES = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"})
_UNSUITABLE_CODES = {
    "AccessDenied": "the credentials do not allow it",
    "AccountIsDisabled": "the account is disabled",
    "AllAccessDisabled": "access to the bucket is disabled",
    "AuthenticationFailed": "the credentials, or this machine's clock, are wrong",
    "AuthorizationFailure": "the credentials do not allow it",
    "AuthorizationHeaderMalformed": "the region is not the bucket's, or the credentials are wrong",
    "AuthorizationPermissionMismatch": "the credentials do not allow it",
    "ContainerNotFound": "there is no such container",
    "InvalidAccessKeyId": "the store does not know the access key",
    "InvalidBucketName": "there can be no bucket of this name",
    "NoSuchBucket": "there is no such bucket",
    "NotImplemented": "the store cannot do this",
    "PermanentRedirect": "the bucket is in another region, or at another endpoint",
    "RequestTimeTooSkewed": "this machine's clock is off",
    "ResourceNotFound": "there is no such container",
    "SignatureDoesNotMatch": "the secret is not the access key's",
}
_RETRYABLE_CODES = frozenset(
    {
        "ConditionalRequestConflict",
        "ExpiredToken",
        "InternalError",
        "OperationAborted",
        "OperationTimedOut",
        "RequestTimeout",
        "ServerBusy",
        "ServiceUnavailable",
        "SlowDown",
        "TooManyRequests",
    }
)

_NO_CREDENTIALS = (
    "no credentials were found: none in the environment, no profile, and no instance metadata "
    "service answers"
)
_METADATA = re.compile(r"169\.254\.|metadata\.google|metadata/identity|metadata/instance")
_ON_THE_WAY = (
    (_METADATA, _NO_CREDENTIALS),
    (re.compile(r"dns error|failed to lookup address"), "the endpoint's name is not known"),
    (re.compile(r"certificate|InvalidCert|TLS", re.I), "no trusted connection to the endpoint"),
    (re.compile(r"timed ?out|TimedOut", re.I), "no answer in time"),
    (re.compile(r"end of file|IncompleteMessage|unexpected EOF", re.I), "the answer broke off"),
    (re.compile(r"Connect\b|connection", re.I), "the connection failed"),
)
"""What broke, told from obstore's text; the first that fits."""

_NO_BUCKET = re.compile(
    r"NoSuchBucket|ContainerNotFound|[Tt]he specified (?:bucket|container) does not exist"
)


class ObjectTooLargeError(CorruptRecordError):
    """An object is larger than its reader allows: damage, which trying again does not mend."""


@contextmanager
def translated(verb: str, key: str) -> Iterator[None]:
    """Re-raise what obstore or the system raises inside as a StoreError that names `key`."""
    try:
        yield
    except (BaseError, OSError) as error:
        raise store_error(error, verb, key) from None


def check_absence(error: FileNotFoundError, verb: str, key: str) -> None:
    """Raise StoreUnsuitableError where "not found" means that the whole bucket is missing.

    Nothing would be newer on a board that does not exist, and a typing error would go unnoticed.
    """
    if _NO_BUCKET.search(str(error)):
        raise StoreUnsuitableError(f"cannot {verb} {key}: there is no such bucket or container")


def http_status(error: BaseException) -> int | None:
    """The HTTP status that obstore's error is about, if there was an answer."""
    found = _HTTP_STATUS.search(str(error))
    return int(found.group(1)) if found else None


def store_error(error: Exception, verb: str, key: str) -> StoreError | StoreUnsuitableError:
    """Our error for `error`: StoreUnsuitableError (fix it), StoreFullError, StoreError (retry)."""
    system, status, code = _system_error(error), http_status(error), _store_code(error)
    message = f"cannot {verb} {key}: {_reason(error, system, status, code)}"
    if system in _FULL or status in _FULL_STATUS or code in _FULL_CODES:
        return StoreFullError(message)
    if code in _RETRYABLE_CODES:
        return StoreError(message)
    if (
        system in _REFUSED
        or status in _UNSUITABLE_STATUS
        or code in _UNSUITABLE_CODES
        or isinstance(error, _UNSUITABLE)
    ):
        return StoreUnsuitableError(message)
    return StoreError(message)


def _system_error(error: Exception) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _OS_ERROR.search(str(error))
    return int(found.group(1)) if found else None


def _store_code(error: Exception) -> str | None:
    """The store's error code, if it is one that we know."""
    for found in _CODE.finditer(str(error)):
        code = found.group(1) or found.group(2)
        if code in _UNSUITABLE_CODES or code in _RETRYABLE_CODES or code in _FULL_CODES:
            return code
    return None


def _reason(error: Exception, system: int | None, status: int | None, code: str | None) -> str:
    if system is not None:
        return os.strerror(system)
    kind = type(error).__name__.removesuffix("Error")
    if status is not None:
        named = f"HTTP status {status}" + (f", {code}" if code else "")
        meaning = _UNSUITABLE_CODES.get(code or "", kind)
        return f"{meaning} ({named})"
    text = str(error)
    return next((words for pattern, words in _ON_THE_WAY if pattern.search(text)), kind)
