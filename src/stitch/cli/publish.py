"""`stitch publish DIR`: a checkpoint directory as the run's next version."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from stitch.cli import exits, flags, text
from stitch.cli.context import Context
from stitch.config import add_flags
from stitch.errors import RunNotFoundError, UsageError
from stitch.types import check_run_name

if TYPE_CHECKING:
    from stitch.publish import Publisher
    from stitch.tensors.reader import Progress

DESCRIPTION = """\
Publish a checkpoint (a safetensors file or directory) as the next version of the run
and wait until it is on the board. A run that does not exist is created from --base.
Publishing takes the run over: a publisher that still runs elsewhere is stopped."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--base", metavar="BASE", help="checkpoint or hub name the run starts from")
    parser.add_argument("--step", type=int, metavar="N", help="the trainer's step, for the record")
    parser.add_argument(
        "--view", help="of a new run: bf16 (default), or checkpoint for weights as stored"
    )
    parser.add_argument("--anchor", action="store_true", help="also store the version whole")
    add_flags(parser, flags.EncodingConfig)
    flags.add_threads_flag(parser)


def run(args: argparse.Namespace, context: Context) -> int:
    from stitch.tensors import open_checkpoint

    console = context.console
    with open_checkpoint(args.directory) as checkpoint:
        with console.progress("reading base") as progress:
            publisher = _publisher(args, context, progress)
        with publisher:
            ticket = publisher.publish(checkpoint, step=args.step)
            ref = ticket.wait()
            publisher.flush()
    stats = ticket.stats
    assert stats is not None, "a published ticket has statistics"
    view_bytes = publisher.run.record.num_bytes
    share = stats.num_bytes / view_bytes if view_bytes else 0.0
    record = {
        "run": ref.run,
        "version": ref.version,
        "step": args.step,
        "digest": publisher.digest,
        "num_elements": stats.num_elements,
        "num_changed": stats.num_changed,
        "density": stats.density,
        "bytes": stats.num_bytes,
        "share_of_view": share,
        "bits_per_changed_element": stats.bits_per_changed_element,
        "encodings": dict(stats.encodings),
    }
    console.result(
        record,
        f"published {ref}: {text.percent(stats.density)} of the elements changed, "
        f"{text.num_bytes(stats.num_bytes)} ({text.percent(share)} of the view)",
    )
    return exits.OK


def _publisher(args: argparse.Namespace, context: Context, progress: Progress | None) -> Publisher:
    """Resume the run; start it if it does not exist and a base is given."""
    from stitch.publish import Publisher

    board = context.open_board(create=True)
    given = {"encoding": args.encoding, "decode": args.decode}
    options = {
        "threads": args.threads,
        "anchor_every": 1 if args.anchor else "auto",
        **vars(context.load(flags.EncodingConfig, "publish", given)),
    }
    name = context.settings.run
    if name is None:
        epoch = board.current_epoch()
        if epoch is None:
            raise UsageError(f"the board at {board.url} has no run yet: name one with --run")
        name = epoch.run
    try:
        existing = board.open_run(check_run_name(name))
    except RunNotFoundError:
        if args.base is None:
            raise RunNotFoundError(
                f"the board at {board.url} has no run {name!r}; give --base to create it"
            ) from None
        return Publisher.open(  # another publisher may create the run meanwhile
            board, name, args.base, args.view or "bf16", progress=progress, **options
        )
    if args.view is not None and args.view != existing.record.view:
        raise UsageError(f"run {name!r} publishes view {existing.record.view!r}, not {args.view!r}")
    return Publisher.resume(board, name, args.base, progress=progress, **options)
