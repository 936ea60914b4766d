"""Stores in the cloud: obstore's backends with our time-outs, retries and credentials.

Within one call obstore tries again itself: server errors, 429, lost connections, and a 409 while
another conditional write is under way, with doubling, jittered waits. What is left is raised and
tried again above (`Patience`, `RetryPolicy`), where a lost reply is told from a lost race.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store
from obstore.store import ObjectStore as Backend

from stitch.board.stores.addresses import BoardAddress, check_endpoint
from stitch.board.stores.credentials import (
    aws_provider,
    aws_region,
    azure_connection,
    google_provider,
)
from stitch.board.stores.store import ObstoreStore
from stitch.errors import StoreUnsuitableError, UsageError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
"""Longest silence while an answer is read."""
REQUEST_TIMEOUT_S = 120.0
"""A whole request. No request moves more than 8 MiB but the create of one large record."""

MAX_RETRIES = 4
RETRY_BUDGET_S = 60.0
"""No retry inside obstore starts later than this after the first try."""
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0


def cloud_store(address: BoardAddress) -> ObstoreStore:
    """The store at an `s3://`, `gs://` or `az://` address; asks nothing of it yet.

    Raises UsageError for options that do not fit, StoreUnsuitableError for credentials that are
    named but cannot be had.
    """
    build = {"s3": _s3, "gs": _gs, "az": _az}[address.scheme]
    try:
        return ObstoreStore(build(address), address.url)
    except BaseError:
        # Nothing was sent yet, so it is a setting that is wrong; the text may quote it.
        raise StoreUnsuitableError(
            f"cannot open {address.url}: a credential or a setting in the environment is malformed"
        ) from None


def _s3(address: BoardAddress) -> Backend:
    profile = address.options.get("profile")
    config: dict[str, Any] = {"bucket": address.bucket, "disable_bulk_delete": True}
    region = address.options.get("region") or aws_region(profile)
    endpoint = _endpoint(address, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    if endpoint is not None:
        # Ours is checked, so that obstore's own reading of the environment must not take over.
        config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint
        region = region or "auto"
    if region is not None:
        config["region"] = region
    style = address.options.get("style", "path")
    if style not in ("path", "virtual"):
        raise UsageError(f"{address.url}: option style must be path or virtual")
    config["virtual_hosted_style_request"] = style == "virtual"
    anonymous = address.flag("anonymous")
    if anonymous:
        config["skip_signature"] = True
    return S3Store(
        prefix=address.prefix or None,
        config=config,  # type: ignore[arg-type]
        client_options=_client(address, endpoint),
        retry_config=_retries(),
        credential_provider=None if anonymous else aws_provider(profile),
    )


def _gs(address: BoardAddress) -> Backend:
    config: dict[str, Any] = {"bucket": address.bucket}
    endpoint = _endpoint(address, "GOOGLE_BASE_URL")
    if endpoint is not None:
        config["base_url"] = endpoint
    anonymous = address.flag("anonymous")
    if anonymous:
        config["skip_signature"] = True
    return GCSStore(
        prefix=address.prefix or None,
        config=config,  # type: ignore[arg-type]
        client_options=_client(address, endpoint),
        retry_config=_retries(),
        credential_provider=None if anonymous else google_provider(),
    )


def _az(address: BoardAddress) -> Backend:
    config: dict[str, Any] = {"account_name": address.account, "container_name": address.bucket}
    config |= azure_connection(address.account)
    endpoint = _endpoint(address, "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    if endpoint is None and "endpoint" in config:
        endpoint = check_endpoint(config["endpoint"], allow_http=address.flag("allow_http"))
    if endpoint is not None:
        config["endpoint"] = endpoint
    if address.flag("anonymous"):
        config["skip_signature"] = True
    return AzureStore(
        prefix=address.prefix or None,
        config=config,  # type: ignore[arg-type]
        client_options=_client(address, endpoint),
        retry_config=_retries(),
    )


def _endpoint(address: BoardAddress, *variables: str) -> str | None:
    """The endpoint of the address, or of the first variable that is set."""
    given = address.options.get("endpoint")
    if given is None:
        given = next((os.environ[name] for name in variables if os.environ.get(name)), None)
    if given is None:
        return None
    return check_endpoint(given, allow_http=_allows_http(address))


def _allows_http(address: BoardAddress) -> bool:
    variable = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}[address.scheme] + "_ALLOW_HTTP"
    return address.flag("allow_http") or os.environ.get(variable, "").lower() in ("1", "true")


def _client(address: BoardAddress, endpoint: str | None) -> ClientConfig:
    """Options of the HTTP client. Plain http only towards an endpoint that was checked for it."""
    return {
        "allow_http": endpoint is not None and endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=min(READ_TIMEOUT_S, _timeout_s(address.options))),
        "timeout": timedelta(seconds=_timeout_s(address.options)),
        "user_agent": "stitch",
    }


def _timeout_s(options: Mapping[str, str]) -> float:
    try:
        timeout_s = float(options.get("timeout_s", REQUEST_TIMEOUT_S))
    except ValueError:
        timeout_s = 0.0
    if not 0.1 <= timeout_s <= 3600.0:
        raise UsageError("option timeout_s of a board's address must be 0.1 to 3600 seconds")
    return timeout_s


def _retries() -> RetryConfig:
    return {
        "max_retries": MAX_RETRIES,
        "retry_timeout": timedelta(seconds=RETRY_BUDGET_S),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_BACKOFF_S),
            "max_backoff": timedelta(seconds=MAX_BACKOFF_S),
            "base": 2,
        },
    }
