"""`stitch serve`: run a replica."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stitch.cli import exits
from stitch.cli.context import Context
from stitch.config import add_flags
from stitch.errors import UsageError
from stitch.replica.config import ReplicaConfig

if TYPE_CHECKING:
    from stitch.replica.app import ReplicaApp

DESCRIPTION = """\
Run a replica: a proxy in front of an engine that is kept on the run's newest
version. By default it starts the embedded engine on the model, with --engine vllm
or sglang one of these; what follows `--` is passed to it. With --engine-url it
attaches to an engine that offers Stitch's control interface. With --engine-mode
reload the engine is a stock one, without Stitch's plugin, that reloads checkpoints
from --engine-dir; together with --engine-url, one that runs already. Every setting may also
come from the file's [serve] table or from STITCH_SERVE_<NAME>. Its address is printed
(with --json, as the one object) as soon as it listens; events are logged on stderr.
SIGTERM and SIGINT end it cleanly."""

ALIASES = {"replica_id": "--id", "url": "--advertise-url", "poll_interval_s": "--poll-interval"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser, ReplicaConfig, skip={"board", "run", "engine_args", "trusted_keys"}, aliases=ALIASES
    )
    for name, what in (("engine", "the engine's control token"), ("admin", "the admin token")):
        parser.add_argument(
            f"--{name}-token-file", metavar="FILE", type=Path, help=f"file that holds {what}"
        )


def run(args: argparse.Namespace, context: Context) -> int:
    from stitch.replica.run import serve

    config = replica_config(args, context)
    logging.getLogger("stitch").setLevel(logging.INFO)

    def announce(app: ReplicaApp, port: int) -> None:
        record = {"replica": app.status.replica, "url": app.url, "port": port, "pid": os.getpid()}
        context.console.result(record, f"replica {app.status.replica} listens at {app.url}")

    serve(config, on_listening=announce)
    return exits.OK


def replica_config(args: argparse.Namespace, context: Context) -> ReplicaConfig:
    """Flags over environment over file; tokens from the files that were named."""
    flags: dict[str, Any] = {
        name: value for name, value in vars(args).items() if name in ReplicaConfig.__annotations__
    }
    flags["board"] = context.board_address
    flags["run"] = context.settings.run
    flags["trusted_keys"] = context.settings.trusted_keys
    flags["engine_args"] = tuple(context.rest) or None
    for name in ("engine", "admin"):
        file: Path | None = getattr(args, f"{name}_token_file")
        if file is not None:
            flags[f"{name}_token"] = read_token(file)
    if flags.get("engine_url") and flags.get("engine") is None:
        flags["engine"] = "attach"
    return context.load(ReplicaConfig, "serve", flags)


def read_token(file: Path) -> str:
    """The token in a file, without the line's end. UsageError if there is none."""
    token = file.read_text(encoding="utf-8").strip()
    if not token:
        raise UsageError(f"{file} holds no token")
    return token
