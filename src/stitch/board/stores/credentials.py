"""Credentials that obstore does not find by itself.

obstore knows each cloud's variables, web identities, container and instance metadata. It does not
know AWS profiles, Google's federated accounts and Azure's connection strings. Values are handed to
obstore and nowhere else; messages name variables, files and profiles only.
"""

from __future__ import annotations

import configparser
import importlib
import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stitch.errors import StoreUnsuitableError, UsageError

if TYPE_CHECKING:
    from obstore.store import S3Credential

_RELOAD_AFTER = timedelta(minutes=5)
"""Profiles are read again this often, so that keys can be rotated under a running process."""

_AWS_ELSEWHERE = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_INDIRECT = ("role_arn", "sso_session", "sso_start_url", "credential_process", "login_session")


def aws_provider(profile: str | None) -> Callable[[], S3Credential] | None:
    """A source of credentials from a profile, or None if obstore is to look in its own places.

    As in AWS's tools: a profile that is asked for comes first, then the environment, then the
    profile of AWS_PROFILE or "default". Profiles with plain keys are read here; others (roles,
    single sign-on, programs) need boto3.
    """
    asked = profile or os.environ.get("AWS_PROFILE")
    if profile is None and any(os.environ.get(name) for name in _AWS_ELSEWHERE):
        return None
    found = _aws_profile(asked or "default")
    if found.get("aws_access_key_id") and found.get("aws_secret_access_key"):
        return lambda: _plain_keys(asked or "default")
    if asked is None and not any(found.get(name) for name in _INDIRECT):
        return None
    if not found:
        raise UsageError(f"there is no AWS profile {asked!r:.100}")
    return _boto3_provider(asked)


def aws_region(profile: str | None) -> str | None:
    """The region that the environment or the profile names."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if os.environ.get(name):
            return os.environ[name]
    return _aws_profile(profile or os.environ.get("AWS_PROFILE") or "default").get("region")


def _aws_profile(name: str) -> dict[str, str]:
    """What the shared credentials file and the configuration file say about a profile."""
    home = Path.home() / ".aws"
    config = Path(os.environ.get("AWS_CONFIG_FILE") or home / "config").expanduser()
    shared = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials")
    section = name if name == "default" else f"profile {name}"
    return _section(config, section) | _section(shared.expanduser(), name)


def _section(path: Path, section: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
        return dict(parser.items(section)) if parser.has_section(section) else {}
    except (configparser.Error, UnicodeDecodeError):
        # Their messages quote the line, which may hold a key.
        raise UsageError(f"{path} is not a proper AWS configuration file") from None


def _plain_keys(name: str) -> S3Credential:
    found = _aws_profile(name)
    return {
        "access_key_id": found["aws_access_key_id"],
        "secret_access_key": found["aws_secret_access_key"],
        "token": found.get("aws_session_token"),
        "expires_at": datetime.now(UTC) + _RELOAD_AFTER,
    }


def _boto3_provider(profile: str | None) -> Callable[[], S3Credential]:
    needs = f"the AWS profile {profile or 'default'!r:.100} holds no plain keys"
    try:
        session = importlib.import_module("boto3.session").Session(profile_name=profile)
        provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider
    except ImportError:
        raise UsageError(
            f"{needs}; for roles, single sign-on and credential programs install boto3: "
            "pip install 'stitch-rl[s3]'"
        ) from None
    try:
        made: Callable[[], S3Credential] = provider(session, ttl=_RELOAD_AFTER)
    except Exception as error:  # botocore's own tree; its messages may hold what a program printed
        raise StoreUnsuitableError(f"{needs}, and boto3 found none: {_kind(error)}") from None
    return made


def google_provider() -> Callable[[], Any] | None:
    """A source of tokens for accounts that obstore does not know (federated, impersonated)."""
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    given = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY")
    if not named or any(os.environ.get(name) for name in given):
        return None
    try:
        kind = json.loads(Path(named).read_text(encoding="utf-8")).get("type")
    except (OSError, ValueError, AttributeError):
        raise UsageError(
            "GOOGLE_APPLICATION_CREDENTIALS does not name a readable JSON file of credentials"
        ) from None
    if kind in ("service_account", "authorized_user"):
        return None
    try:
        provider = importlib.import_module("obstore.auth.google").GoogleCredentialProvider
    except ImportError:
        raise UsageError(
            "the account in GOOGLE_APPLICATION_CREDENTIALS is a federated or impersonated one; "
            "for these install google-auth: pip install 'stitch-rl[gs]'"
        ) from None
    try:
        made: Callable[[], Any] = provider()
    except Exception as error:  # google-auth's own tree
        raise StoreUnsuitableError(f"google-auth found no credentials: {_kind(error)}") from None
    return made


def _kind(error: Exception) -> str:
    return type(error).__name__


_AZURE_GIVEN = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE",
)
_AZURE_FIELDS = {
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}


def azure_connection(account: str) -> Mapping[str, str]:
    """obstore's settings from AZURE_STORAGE_CONNECTION_STRING, unless others are given."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
    if not text or any(os.environ.get(name) for name in _AZURE_GIVEN):
        return {}
    fields: dict[str, str] = {}
    for part in text.strip().strip(";").split(";"):
        name, equals, value = part.partition("=")
        if not equals:
            raise UsageError("AZURE_STORAGE_CONNECTION_STRING is not NAME=VALUE;NAME=VALUE;...")
        fields[name.strip().lower()] = value.strip()
    if fields.get("accountname") not in (None, account):
        raise UsageError(
            "AZURE_STORAGE_CONNECTION_STRING is of another account than the board's address "
            f"az://{account}/..."
        )
    return {ours: fields[theirs] for theirs, ours in _AZURE_FIELDS.items() if theirs in fields}
