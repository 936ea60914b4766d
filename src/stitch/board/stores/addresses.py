"""Addresses of boards, taken apart: `s3://BUCKET/PREFIX?endpoint=...` and the like.

    /shared/board, file:///shared/board     a directory (NFS included)
    memory://NAME                           this process's memory
    s3://BUCKET[/PREFIX]                    S3 and everything that speaks it
    gs://BUCKET[/PREFIX]                    Google Cloud Storage
    az://ACCOUNT/CONTAINER[/PREFIX]         Azure Blob Storage

Options stand in the query (`OPTIONS`). Credentials never do: addresses end up in process lists,
configuration files and logs. See docs/operations.md, "Where the board lives".
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import parse_qsl, unquote, urlsplit

from stitch.errors import UsageError

CLOUD_SCHEMES = ("s3", "gs", "az")

OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "s3": ("endpoint", "region", "style", "profile", "anonymous", "allow_http", "timeout_s"),
        "gs": ("endpoint", "anonymous", "allow_http", "timeout_s"),
        "az": ("endpoint", "anonymous", "allow_http", "timeout_s"),
    }
)

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}", re.ASCII)
_SEGMENT = re.compile(r"[A-Za-z0-9._=+@-]{1,200}", re.ASCII)
_SECRET = re.compile(r"key|secret|token|sas|sig|password|credential", re.I)
_HOW = "a directory, file:///PATH, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://ACCOUNT/CONTAINER"


@dataclass(frozen=True, kw_only=True)
class BoardAddress:
    """A parsed address. `bucket` is the container on Azure, the path of a directory, the name of
    a memory store; `account` is empty but on Azure."""

    scheme: str
    account: str = ""
    bucket: str
    prefix: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The address without its options, for messages."""
        place = "/".join(part for part in (self.account, self.bucket, self.prefix) if part)
        return f"{self.scheme}://{place}"

    def flag(self, name: str) -> bool:
        """A yes-or-no option; UsageError for anything else."""
        value = self.options.get(name, "false")
        if value not in ("true", "false"):
            raise UsageError(f"{self.url}: option {name} must be true or false")
        return value == "true"


def parse_address(address: str) -> BoardAddress:
    """Take an address apart; UsageError says what is wrong, without repeating any option."""
    if not address.strip():
        raise UsageError(f"a board needs a place: {_HOW}")
    if "://" not in address:
        return BoardAddress(scheme="file", bucket=address)
    try:
        parts = urlsplit(address)
    except ValueError:
        raise UsageError(f"a board's address is not a proper URL; give {_HOW}") from None
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return BoardAddress(scheme="file", bucket=unquote(parts.path))
    if parts.scheme == "memory":
        return BoardAddress(scheme="memory", bucket=parts.netloc + parts.path)
    if parts.scheme not in CLOUD_SCHEMES:
        raise UsageError(f"a board at {parts.scheme}:// is not supported: give {_HOW}")
    if "@" in parts.netloc or ":" in parts.netloc:
        raise UsageError(
            f"a {parts.scheme}:// address begins with a bucket's name, without user, password or "
            "port; an endpoint is the option ?endpoint=, credentials come from the environment"
        )
    places = [parts.netloc, *(part for part in parts.path.split("/") if part)]
    account = places.pop(0) if parts.scheme == "az" else ""
    if not places:
        raise UsageError("an Azure board is az://ACCOUNT/CONTAINER[/PREFIX]")
    found = BoardAddress(
        scheme=parts.scheme,
        account=account,
        bucket=_name(places[0], "bucket"),
        prefix="/".join(_segment(part) for part in places[1:]),
        options=_options(parts.scheme, parts.query, parts.fragment),
    )
    if account:
        _name(account, "account")
    return found


def _name(name: str, what: str) -> str:
    if not _BUCKET.fullmatch(name):
        raise UsageError(f"{name!r:.100} cannot be the name of a board's {what}")
    return name


def _segment(part: str) -> str:
    if not _SEGMENT.fullmatch(part) or part in (".", ".."):
        raise UsageError(
            f"{part!r:.100} is not allowed in a board's prefix: letters, digits and ._=+@-"
        )
    return part


def _options(scheme: str, query: str, fragment: str) -> Mapping[str, str]:
    if fragment:
        raise UsageError("a board's address has no #fragment")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise UsageError("the options of a board's address must be NAME=VALUE&...") from None
    options: dict[str, str] = {}
    for name, value in pairs:
        if name not in OPTIONS[scheme]:
            raise UsageError(_unknown(scheme, name))
        if name in options:
            raise UsageError(f"a board's address gives option {name} twice")
        options[name] = value
    return options


def _unknown(scheme: str, name: str) -> str:
    known = OPTIONS[scheme]
    if near := difflib.get_close_matches(name, known, n=1):
        return f"a {scheme}:// address has no such option; did you mean {near[0]}?"
    if _SECRET.search(name):
        return (
            "credentials do not belong into a board's address, which shows in process lists and "
            "logs: put them into the environment or a profile (docs/operations.md)"
        )
    return f"a {scheme}:// address has no such option; known: {', '.join(known)}"


def check_endpoint(endpoint: str, *, allow_http: bool) -> str:
    """`endpoint` without a trailing slash, if it is a plain http(s) address.

    Unencrypted http is for loopback, unless `allow_http`.
    """
    try:
        parts = urlsplit(endpoint)
        host = parts.hostname or ""
        parts.port  # noqa: B018 - raises for a port that is none
    except ValueError:
        host = ""
    if not host or parts.scheme not in ("http", "https"):
        raise UsageError("a store's endpoint must be http(s)://HOST[:PORT][/PATH]")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError("a store's endpoint carries no credentials, query or fragment")
    if parts.scheme == "http" and not (allow_http or is_loopback(host)):
        raise UsageError(
            f"the endpoint at {host} is plain http, which anyone on the way can read and change: "
            "use https, or say allow_http=true"
        )
    return endpoint.rstrip("/")


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
