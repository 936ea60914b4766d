"""Short calls to replicas over HTTP, with the standard library; no proxy in between."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from stitch.errors import EngineError, EngineUnreachableError, RequestFailedError, UsageError
from stitch.types import is_http_address

MAX_REPLY_BYTES = 64 * 2**20
RETRYABLE = frozenset({429, 502, 503, 504})


def post_json(url: str, *, token: str | None, timeout_s: float) -> dict[str, Any]:
    """POST without a body and parse the reply.

    Raises EngineUnreachableError if there is no reply, EngineError for one that may be better next
    time, RequestFailedError for any other that is not a 200 with a JSON object.
    """
    if not is_http_address(url):
        raise UsageError(f"{url!r:.300} is not an http(s) address")
    request = urllib.request.Request(url, data=b"", method="POST")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        with opener.open(request, timeout=timeout_s) as reply:
            body = json.loads(reply.read(MAX_REPLY_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(1000).decode("utf-8", "replace")
        answered = f"{url} answered {error.code}: {said}"
        if error.code in RETRYABLE:
            raise EngineError(answered) from None
        raise RequestFailedError(answered, status=error.code) from None
    except (ValueError, RecursionError) as error:
        raise RequestFailedError(f"{url} did not answer with JSON: {error}") from None
    except http.client.HTTPException as error:
        raise EngineUnreachableError(f"{url} does not speak HTTP: {error!r:.300}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise EngineUnreachableError(f"{url} does not answer: {reason}") from None
    if not isinstance(body, dict):
        raise RequestFailedError(f"{url} did not answer with a JSON object")
    return body


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A token must not follow a redirect to somebody else."""

    def redirect_request(self, *_: Any) -> None:
        return None
