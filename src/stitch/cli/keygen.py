"""`stitch keygen FILE`: a key pair for signing what a publisher writes."""

from __future__ import annotations

import argparse
from pathlib import Path

from stitch.cli import exits
from stitch.cli.context import Context

DESCRIPTION = """\
Write a new Ed25519 key pair in PEM form: the private key to FILE, readable by its
owner alone, for publishers (--signing-key or STITCH_SIGNING_KEY); the public key to
FILE.pub, for replicas (--trusted-keys or STITCH_TRUSTED_KEYS). Overwrites nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="where the private key goes")


def run(args: argparse.Namespace, context: Context) -> int:
    from stitch.board.stores.signing import generate

    public = args.file.with_name(f"{args.file.name}.pub")
    signer = generate(args.file, public)
    record = {"key": signer.key_id, "private": str(args.file), "public": str(public)}
    context.console.result(
        record, f"key {signer.key_id}: private in {args.file}, public in {public}"
    )
    return exits.OK
