"""`stitch fork RUN@VERSION NEW`: a new run that begins with a version of another one."""

from __future__ import annotations

import argparse
from pathlib import Path

from stitch.cli import exits
from stitch.cli.checkout import add_base_flags
from stitch.cli.context import Context

DESCRIPTION = """\
Create run NEW, whose version 0 is a version of another run. The version is rebuilt
and proven first; no weights are copied, so what leads to it is kept as long as the
fork is there (`--anchor` stores the weights with the fork, too). The board's current
run stays as it is until something is published into the fork, or --current is given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="RUN@VERSION", help="where to fork")
    parser.add_argument("new", metavar="NEW", help="name of the new run")
    parser.add_argument("--anchor", action="store_true", help="also store the weights whole")
    parser.add_argument(
        "--current",
        action="store_true",
        help="make it the current run: replicas follow, a publisher of another run is stopped",
    )
    add_base_flags(parser)


def run(args: argparse.Namespace, context: Context) -> int:
    from stitch.publish.anchor import write_anchor
    from stitch.publish.fence import end_epoch
    from stitch.publish.lineage import fork_run, new_writer
    from stitch.types import VersionRef

    board, scratch = context.board, Path(args.scratch) if args.scratch else None
    parent = VersionRef.parse(args.version)
    with context.console.progress("reading base") as progress:
        created, mirror = fork_run(
            board, args.new, parent, args.base, progress, args.threads, scratch
        )
    if args.anchor:
        with context.console.progress("storing") as progress:
            write_anchor(created, mirror.weights, 0, scratch=scratch, progress=progress)
    if args.current:
        end_epoch(created, board.begin_epoch(created.name, new_writer()))  # nothing follows in it
    record = {
        "run": created.name,
        "parent": {"run": parent.run, "version": parent.version},
        "digest": mirror.digest,
        "anchor": args.anchor,
        "current": args.current,
    }
    context.console.result(
        record, f"{created.name}@0 is {parent}, digest {mirror.digest} (rebuilt and proven)"
    )
    return exits.OK
