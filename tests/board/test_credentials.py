"""Where credentials come from beyond what obstore knows; none of them shows in a message."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from stitch.board.stores.credentials import (
    aws_provider,
    aws_region,
    azure_connection,
    google_provider,
)
from stitch.errors import UsageError

CANARY = "C4NARYx9QpZ7sWt3LkVb8NhRf2Yd"


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No credentials but those that a test writes; boto3 and google-auth are not installed."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for module in ("boto3.session", "obstore.auth.boto3", "obstore.auth.google"):
        monkeypatch.setitem(sys.modules, module, None)
    return tmp_path


def write_keys(path: Path, profile: str, key: str) -> None:
    with path.open("a") as file:
        file.write(f"[{profile}]\naws_access_key_id={key}\naws_secret_access_key={CANARY}\n")


def test_without_profiles_obstore_looks_in_its_own_places() -> None:
    assert aws_provider(None) is None


def test_the_environment_comes_before_the_profile_of_the_environment(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_keys(files / "credentials", "default", "one")
    provider = aws_provider(None)
    assert provider is not None
    assert provider()["access_key_id"] == "one"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "env")
    assert aws_provider(None) is None


def test_a_profile_that_the_address_names_comes_before_everything(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "env")
    write_keys(files / "credentials", "trainer", "two")
    provider = aws_provider("trainer")
    assert provider is not None
    assert provider()["access_key_id"] == "two"


def test_keys_that_are_rotated_are_read_again(files: Path) -> None:
    write_keys(files / "credentials", "default", "old")
    provider = aws_provider(None)
    assert provider is not None
    (files / "credentials").unlink()
    write_keys(files / "credentials", "default", "new")
    found = provider()
    assert found["access_key_id"] == "new"
    assert found["expires_at"] is not None


def test_the_region_comes_from_the_environment_or_the_profile(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "config").write_text("[profile trainer]\nregion = eu-north-1\n")
    assert aws_region(None) is None
    assert aws_region("trainer") == "eu-north-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    assert aws_region("trainer") == "us-west-2"


def test_a_profile_that_needs_boto3_says_so(files: Path) -> None:
    (files / "config").write_text("[profile sso]\nsso_session = corp\n")
    with pytest.raises(UsageError, match="install boto3"):
        aws_provider("sso")


def test_a_profile_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="no AWS profile 'nobody'"):
        aws_provider("nobody")


def test_a_broken_file_of_credentials_is_not_quoted(files: Path) -> None:
    (files / "credentials").write_text(f"[default]\n{CANARY}\n")
    with pytest.raises(UsageError, match="not a proper AWS configuration file") as raised:
        aws_provider(None)
    assert CANARY not in str(raised.value)


@pytest.mark.parametrize("kind", ["service_account", "authorized_user"])
def test_google_accounts_that_obstore_knows_are_left_to_it(
    files: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert google_provider() is None
    (files / "google.json").write_text(json.dumps({"type": kind, "private_key": CANARY}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(files / "google.json"))
    assert google_provider() is None


def test_a_federated_google_account_says_what_it_needs(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "google.json").write_text(json.dumps({"type": "external_account"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(files / "google.json"))
    with pytest.raises(UsageError, match="install google-auth"):
        google_provider()


@pytest.mark.parametrize("content", ["{", "[]", CANARY])
def test_an_unreadable_google_file_is_not_quoted(
    files: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    (files / "google.json").write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(files / "google.json"))
    with pytest.raises(UsageError, match="does not name a readable JSON file") as raised:
        google_provider()
    assert CANARY not in str(raised.value)


def test_an_azure_connection_string_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert azure_connection("account") == {}
    text = f"AccountName=account;AccountKey={CANARY}==;BlobEndpoint=https://e.example/account;"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert azure_connection("account") == {
        "account_key": f"{CANARY}==",
        "endpoint": "https://e.example/account",
    }
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "other")
    assert azure_connection("account") == {}


@pytest.mark.parametrize("text", [f"AccountName=other;AccountKey={CANARY}", f"{CANARY}"])
def test_a_wrong_azure_connection_string_is_not_quoted(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    with pytest.raises(UsageError, match="AZURE_STORAGE_CONNECTION_STRING is") as raised:
        azure_connection("account")
    assert CANARY not in str(raised.value)
