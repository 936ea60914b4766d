"""Addresses of boards: what they say, what they may not say, and what a wrong one is told."""

from __future__ import annotations

import pytest

from stitch.board import open_board
from stitch.board.stores.addresses import BoardAddress, check_endpoint, parse_address
from stitch.errors import UsageError

CANARY = "C4NARYx9QpZ7sWt3LkVb8NhRf2Yd"


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("/shared/board", BoardAddress(scheme="file", bucket="/shared/board")),
        ("file:///a%20b/c", BoardAddress(scheme="file", bucket="/a b/c")),
        ("file://localhost/a", BoardAddress(scheme="file", bucket="/a")),
        ("memory://x", BoardAddress(scheme="memory", bucket="x")),
        ("s3://bucket", BoardAddress(scheme="s3", bucket="bucket")),
        ("s3://my.bucket/a//b/", BoardAddress(scheme="s3", bucket="my.bucket", prefix="a/b")),
        (
            "s3://b1/p?endpoint=https://e.example:9000&region=auto",
            BoardAddress(
                scheme="s3",
                bucket="b1",
                prefix="p",
                options={"endpoint": "https://e.example:9000", "region": "auto"},
            ),
        ),
        ("gs://bucket/p", BoardAddress(scheme="gs", bucket="bucket", prefix="p")),
        (
            "az://account/container/p",
            BoardAddress(scheme="az", account="account", bucket="container", prefix="p"),
        ),
    ],
)
def test_addresses_are_taken_apart(address: str, wanted: BoardAddress) -> None:
    assert parse_address(address) == wanted


def test_messages_show_an_address_without_its_options() -> None:
    found = parse_address("az://account/container/p?endpoint=https://e.example/account")
    assert found.url == "az://account/container/p"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "needs a place"),
        ("ftp://host/x", "ftp:// is not supported"),
        ("s3:///prefix", "cannot be the name"),
        ("s3://b_/../x", "not allowed in a board's prefix"),
        ("s3://bucket/a b", "not allowed in a board's prefix"),
        ("az://account", "az://ACCOUNT/CONTAINER"),
        ("s3://bucket?endpont=x", "did you mean endpoint"),
        ("gs://bucket?style=path", "no such option; known"),
        ("s3://bucket?region", "must be NAME=VALUE"),
        ("s3://bucket?region=a&region=b", "gives option region twice"),
        ("s3://bucket#x", "no #fragment"),
        ("s3://bucket:9000/x", "without user, password or port"),
        ("s3://[bucket/x", "not a proper URL"),
    ],
)
def test_a_wrong_address_is_told_what_is_wrong(address: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        parse_address(address)


@pytest.mark.parametrize(
    "address",
    [
        f"s3://AKIA:{CANARY}@bucket/x",
        f"s3://bucket?aws_secret_access_key={CANARY}",
        f"s3://bucket?X-Amz-Signature={CANARY}",
        f"az://account/container?sas_token={CANARY}",
        f"s3://bucket?endpoint=https://u:{CANARY}@e.example",
        f"s3://bucket?endpoint=https://e.example?sig={CANARY}",
        f"s3://bucket?style={CANARY}",
        f"s3://bucket?anonymous={CANARY}",
        f"s3://bucket?timeout_s={CANARY}",
        f"s3://bucket?{CANARY}=1",
        f"s3://bucket?{CANARY}",
        f"s3://bucket#{CANARY}",
    ],
)
def test_a_secret_in_an_address_is_refused_and_not_repeated(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with pytest.raises(UsageError) as raised:
        open_board(address)
    assert CANARY not in str(raised.value)


@pytest.mark.parametrize(
    "endpoint", ["http://127.0.0.1:9000", "http://localhost:1/account", "http://[::1]:80"]
)
def test_plain_http_is_for_loopback(endpoint: str) -> None:
    assert check_endpoint(f"{endpoint}/", allow_http=False) == endpoint


@pytest.mark.parametrize("host", ["store.example", "127.0.0.1.example", "localhost.example"])
def test_plain_http_elsewhere_must_be_asked_for(host: str) -> None:
    with pytest.raises(UsageError, match="plain http"):
        check_endpoint(f"http://{host}:9000", allow_http=False)
    assert check_endpoint(f"http://{host}:9000", allow_http=True) == f"http://{host}:9000"
    assert check_endpoint(f"https://{host}", allow_http=False) == f"https://{host}"


@pytest.mark.parametrize("endpoint", ["store.example", "ftp://x", "http://", "https://x:port"])
def test_an_endpoint_must_be_an_address(endpoint: str) -> None:
    with pytest.raises(UsageError, match="endpoint must be"):
        check_endpoint(endpoint, allow_http=True)
