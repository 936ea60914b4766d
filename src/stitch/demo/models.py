"""Find or make the model directory that the demo trains and serves."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stitch.demo.output import tail
from stitch.errors import FatalError, UsageError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
Say = Callable[[str], None]


def cache_dir() -> Path:
    """`$STITCH_CACHE`, else `$XDG_CACHE_HOME/stitch`, else `~/.cache/stitch`."""
    chosen = os.environ.get("STITCH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stitch"


def prepare_model(model: str | None, *, tiny: bool, work: Path, say: Say) -> Path:
    """The directory of `model`: a directory, a hub name, or None for the demo's own.

    `tiny` writes a small random model under `work` instead.
    """
    if tiny:
        from stitch.demo.tiny_model import write_tiny_model

        return write_tiny_model(work / "model")
    if model is None:
        return _default_model(say)
    if Path(model).is_dir():
        return _checked(Path(model))
    return _from_hub(model, say)


def _default_model(say: Say) -> Path:
    target = cache_dir() / "models" / DEFAULT_MODEL
    return make_once(target, lambda into: _convert(into, say))


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Run `make(directory)` unless `target` exists, then rename the directory to `target`.

    Processes that come at the same time wait for the first one; a directory that was interrupted
    half-way never appears under its final name.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(target.name + ".lock")):
        if not target.is_dir():
            temp = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            try:
                make(temp)
                temp.chmod(0o755)
                temp.rename(target)
            finally:
                shutil.rmtree(temp, ignore_errors=True)
    return _checked(target)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel releases it if this process dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(into: Path, say: Say) -> None:
    """Fetch and convert in a child process, so that this one stays without torch."""
    say(f"preparing {DEFAULT_MODEL} (once; kept in {cache_dir()})")
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "stitch.demo.smollm2", str(into)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=log, check=False)
        if done.returncode:
            log.seek(0)
            raise FatalError(f"preparing {DEFAULT_MODEL} failed:\n{tail(log.read())}")


def _from_hub(name: str, say: Say) -> Path:
    say(f"fetching {name} from the model hub")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError:
        raise UsageError("a hub model needs `pip install stitch-rl[demo]`") from None
    try:
        return _checked(Path(snapshot_download(name, allow_patterns=list(HUB_FILES))))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UsageError(f"{name!r} is neither a directory nor a hub model: {error}") from None


def _checked(directory: Path) -> Path:
    missing = [name for name in ("config.json",) if not (directory / name).is_file()]
    if missing or not any(directory.glob("*.safetensors")):
        raise UsageError(
            f"{directory} is not a model directory: it needs config.json and *.safetensors files"
        )
    return directory.resolve()
