"""The store of the link benchmark: SeaweedFS with its S3 interface, in the trainer's namespace."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks._link_net import HOME_ADDRESS

S3_PORT, FILER_PORT, MASTER_PORT = 8333, 8888, 9333
BUCKET = "stitch"
START_S = 120.0
BOARD = (
    f"s3://{BUCKET}/board?endpoint=http://{HOME_ADDRESS}:{S3_PORT}"
    "&region=us-east-1&anonymous=true&allow_http=true"
)


def weed() -> Path:
    """SeaweedFS's program; SystemExit if it is not there."""
    servers = os.environ.get("STITCH_STORE_SERVERS", "build/store-servers")
    program = Path(servers).resolve() / "weed" / "bin" / "weed"
    if not program.exists():
        raise SystemExit(f"{program} is not installed: run `make test-stores` once")
    return program


def command(folder: Path) -> list[str]:
    """A server with one open bucket; its ports are its namespace's own."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        str(weed()), "server", f"-ip={HOME_ADDRESS}", "-ip.bind=0.0.0.0", f"-dir={folder}", "-s3",
        f"-s3.port={S3_PORT}", f"-filer.port={FILER_PORT}", f"-master.port={MASTER_PORT}",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false", "-master.telemetry=false",
        "-master.volumeSizeLimitMB=256", "-volume.max=64", "-volume.minFreeSpace=1",
        f"-filer.localSocket={folder / 'f.sock'}", f"-s3.localSocket={folder / 's.sock'}",
    ]  # fmt: skip


def wait_and_make_bucket() -> None:
    """To be called in the server's namespace."""
    _until(f"http://{HOME_ADDRESS}:{FILER_PORT}/")
    _until(f"http://{HOME_ADDRESS}:{MASTER_PORT}/dir/assign")
    _until(f"http://{HOME_ADDRESS}:{S3_PORT}/status")
    _ask(f"http://{HOME_ADDRESS}:{FILER_PORT}/buckets/{BUCKET}/", "POST")


def _until(url: str) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        status = _ask(url)
        if status is not None and status < 500:
            return
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the store did not answer at {url} within {START_S:.0f} s")
        time.sleep(0.1)


def _ask(url: str, method: str = "GET") -> int | None:
    try:
        request = urllib.request.Request(url, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


if __name__ == "__main__":
    wait_and_make_bucket()
    print("{}", flush=True)
