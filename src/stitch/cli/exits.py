"""Exit codes, sorted by what the caller does next, as the errors are."""

from __future__ import annotations

from stitch.errors import FatalError, RetryableError, UsageError

OK = 0
UNEQUAL = 1
USAGE = 2
RETRYABLE = 3
FATAL = 4
INTERRUPTED = 130

TABLE = """\
exit codes:
  0    done
  1    a check failed: what was compared is not equal
  2    the call, a file or the configuration must change
  3    trying again later may succeed
  4    a fault that trying again does not mend
  130  interrupted
"""


def code_for(error: BaseException) -> int:
    """The exit code of an error that ended the program."""
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, RetryableError | TimeoutError | ConnectionError):
        return RETRYABLE
    if isinstance(error, FatalError):
        return FATAL
    if isinstance(error, OSError):
        return USAGE
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return FATAL
