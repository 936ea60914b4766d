"""`stitch anchor VERSION`: store a version whole on the board."""

from __future__ import annotations

import argparse
from pathlib import Path

from stitch.cli import exits, text
from stitch.cli.checkout import add_base_flags, mirror_at
from stitch.cli.context import Context, parse_version

DESCRIPTION = """\
Store a version whole on the board, as an ordinary checkpoint, so that replicas and
`stitch checkout` can start from it without the base and the patches before it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="VERSION", help="a number, or latest")
    add_base_flags(parser)


def run(args: argparse.Namespace, context: Context) -> int:
    from stitch.publish.anchor import write_anchor

    run = context.run
    version = parse_version(args.version, run)
    present = run.anchor(version)
    if present is None:
        scratch = Path(args.scratch) if args.scratch else None
        mirror = mirror_at(run, version, args, context.console)
        with context.console.progress("storing") as progress:
            present = write_anchor(run, mirror.weights, version, scratch=scratch, progress=progress)
    record = {
        "run": run.name,
        "version": version,
        "digest": present.digest,
        "bytes": present.num_bytes,
        "files": [ref.name for ref in present.files],
    }
    context.console.result(
        record,
        f"{run.name}@{version} is stored whole: {text.num_bytes(present.num_bytes)}, "
        f"digest {present.digest}",
    )
    return exits.OK
