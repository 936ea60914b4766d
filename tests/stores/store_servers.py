"""SeaweedFS and Azurite on loopback, for the tests here. `make test-stores` installs them.

Each server gets free ports, a folder of its own and one bucket or container; a test takes a prefix
in it. What a server says goes to a log file beside its data.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

SERVERS = Path(os.environ.get("STITCH_STORE_SERVERS", "build/store-servers")).resolve()
WEED = SERVERS / "weed" / "bin" / "weed"
AZURITE = SERVERS / "azurite" / "node_modules" / ".bin" / "azurite-blob"

START_S = 90.0
BUCKET = "stitch"
OPEN_BUCKET = "open"
"""On SeaweedFS: takes requests without signatures, so that a proxy may change them on the way."""
ACCOUNT = "stitchtest"


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server: where it listens, and the environment that a client of it needs."""

    scheme: str
    port: int
    environment: dict[str, str]
    log: Path

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def board_url(self, prefix: str, *, port: int | None = None, unsigned: bool = False) -> str:
        """Address of a board at `prefix`; `port` is that of a proxy before the server."""
        endpoint = f"http://127.0.0.1:{port or self.port}"
        if unsigned:
            return f"s3://{OPEN_BUCKET}/{prefix}?endpoint={endpoint}&anonymous=true"
        if self.scheme == "s3":
            return f"s3://{BUCKET}/{prefix}?endpoint={endpoint}"
        return f"az://{ACCOUNT}/{BUCKET}/{prefix}?endpoint={endpoint}/{ACCOUNT}"

    def fresh_prefix(self) -> str:
        return f"t{secrets.token_hex(6)}"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all are held open until all are known."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]


@contextmanager
def seaweedfs(folder: Path) -> Iterator[Server]:
    """A SeaweedFS with its S3 gateway, which wants signed requests."""
    require(WEED)
    folder.mkdir(parents=True)
    key, secret = "STITCHTESTKEY", secrets.token_hex(20)
    identity = {
        "name": "stitch",
        "credentials": [{"accessKey": key, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    verbs = [f"{verb}:{OPEN_BUCKET}" for verb in ("Admin", "Read", "Write", "List")]
    anyone = {"name": "anonymous", "actions": verbs}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity, anyone]}))
    names = ["master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3"]
    ports = dict(zip([*names, "s3.grpc"], free_ports(8), strict=True))
    command = [str(WEED), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}"]
    command += ["-s3", f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0"]
    command += ["-s3.port.lance=0", "-s3.iam=false", "-master.telemetry=false"]
    # Small volumes, and as many as the disk holds: each bucket takes several at once.
    command += ["-master.volumeSizeLimitMB=256", "-volume.max=64", "-volume.minFreeSpace=1"]
    command += [f"-filer.localSocket={folder / 'f.sock'}", f"-s3.localSocket={folder / 's.sock'}"]
    for name, port in ports.items():
        server, _, kind = name.partition(".")
        command.append(f"-{server}.port{'.' + kind if kind else ''}={port}")
    server = Server(
        scheme="s3",
        port=ports["s3"],
        environment={
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
        },
        log=folder / "server.log",
    )
    with running(command, server.log) as process:
        filer = f"http://127.0.0.1:{ports['filer']}"
        wait_for(f"{filer}/", process, server.log)
        wait_for(f"http://127.0.0.1:{ports['master']}/dir/assign", process, server.log)
        wait_for(f"{server.endpoint}/status", process, server.log)
        for bucket in (BUCKET, OPEN_BUCKET):
            request("POST", f"{filer}/buckets/{bucket}/", {})
        yield server


@contextmanager
def azurite(folder: Path) -> Iterator[Server]:
    """An Azurite blob service in memory, which wants signed requests."""
    require(AZURITE)
    folder.mkdir(parents=True)
    key = base64.b64encode(secrets.token_bytes(48)).decode()
    (port,) = free_ports(1)
    command = [str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"]
    command += ["--skipApiVersionCheck", "--location", str(folder), "--disableTelemetry"]
    server = Server(
        scheme="az",
        port=port,
        environment={"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": key},
        log=folder / "server.log",
    )
    accounts = os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"}
    with running(command, server.log, accounts) as process:
        wait_for(f"{server.endpoint}/", process, server.log)
        create_container(server, key)
        yield server


def require(program: Path) -> None:
    if not program.exists():
        raise RuntimeError(f"{program} is not installed: run `make test-stores`")


@contextmanager
def running(
    command: Sequence[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server process in a process group of its own, ended with it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until something answers at `url` without a server error."""
    deadline_s = time.monotonic() + START_S
    while True:
        status = request("GET", url, {})
        if status is not None and status < 500:
            return
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(
                f"{process.args[0]} did not answer: {log.read_text(errors='replace')[-2000:]}"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)


def request(method: str, url: str, headers: dict[str, str], body: bytes = b"") -> int | None:
    """The status of one request, None if nobody answers."""
    asked = urllib.request.Request(url, data=body or None, headers=headers, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def create_container(server: Server, key: str) -> None:
    """Azure's "Create Container", signed with the account's key (Shared Key, version 2015 on)."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n"
    signed += f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    mac = hmac.new(base64.b64decode(key), signed.encode(), hashlib.sha256)
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(mac.digest()).decode()}",
        "Content-Length": "0",
    }
    url = f"{server.endpoint}/{ACCOUNT}/{BUCKET}?restype=container"
    status = request("PUT", url, headers)
    if status != 201:
        raise RuntimeError(f"Azurite did not create the container: HTTP status {status}")
