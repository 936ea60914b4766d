"""From obstore's and the system's errors to ours, without leaking what they carry."""

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
_HTTP_STATUS = re.compile(r"\b(?:status|Server returned non-2xx status code:?)\D{0,20}([45]\d\d)\b")

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


class ObjectTooLargeError(CorruptRecordError):
    """An object is larger than its reader allows: damage, which trying again does not mend."""


@contextmanager
def translated(verb: str, key: str) -> Iterator[None]:
    """Re-raise what obstore or the system raises inside as a StoreError that names `key`."""
    try:
        yield
    except (BaseError, OSError) as error:
        raise store_error(error, verb, key) from None


def store_error(error: Exception, verb: str, key: str) -> StoreError | StoreUnsuitableError:
    """Our error for `error`. Only its kind, system error and HTTP status are taken over."""
    code = _system_error(error)
    message = f"cannot {verb} {key}: {_reason(error, code)}"
    if code in _FULL:
        return StoreFullError(message)
    if code in _REFUSED or isinstance(error, _UNSUITABLE):
        return StoreUnsuitableError(message)
    return StoreError(message)


def _system_error(error: Exception) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _OS_ERROR.search(str(error))
    return int(found.group(1)) if found else None


def _reason(error: Exception, code: int | None) -> str:
    if code is not None:
        return os.strerror(code)
    kind = type(error).__name__.removesuffix("Error")
    status = _HTTP_STATUS.search(str(error))
    return f"{kind} (HTTP status {status.group(1)})" if status else kind
