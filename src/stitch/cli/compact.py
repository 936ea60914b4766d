"""`stitch compact`: write the merged patches that a run lacks."""

from __future__ import annotations

import argparse
import logging
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from stitch.cli import exits, flags, text
from stitch.cli.checkout import add_base_flags
from stitch.cli.context import Context
from stitch.cli.signals import stopping
from stitch.config import add_flags
from stitch.errors import StoreError

if TYPE_CHECKING:
    from stitch.publish.compact import Compactor
    from stitch.records import MergedPatch

DESCRIPTION = """\
Write merged patches, which lead over 4, 8, 16 ... versions at once, so that replicas far
behind fetch few objects and about the bytes of the direct difference. May run anywhere
and at any time, also several times at once; needs memory for the weights twice. The
weights are rebuilt from the run's base, or from an anchor."""
DEFAULT_INTERVAL_S = 10.0

log = logging.getLogger("stitch.cli.compact")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--follow", action="store_true", help="go on with new versions until it is stopped"
    )
    parser.add_argument(
        "--interval-s",
        type=flags.seconds,
        default=DEFAULT_INTERVAL_S,
        metavar="S",
        help=f"with --follow: seconds between looks at the board (default: {DEFAULT_INTERVAL_S:g})",
    )
    add_base_flags(parser)
    add_flags(parser, flags.EncodingConfig)


def run(args: argparse.Namespace, context: Context) -> int:
    from stitch.publish.compact import Compactor

    run = context.run
    given = {"encoding": args.encoding, "decode": args.decode}
    chosen = context.load(flags.EncodingConfig, "compact", given)
    stopped = threading.Event()
    compactor = Compactor(
        run,
        base=args.base,
        scratch=Path(args.scratch) if args.scratch else None,
        encoding=chosen.encoding,
        decode=chosen.decode,
        threads=args.threads,
        stop=stopped.is_set,
    )
    written: list[MergedPatch] = []
    with closing(compactor), stopping(stopped, args.follow):
        _compact(compactor, context, written)
        while args.follow and not stopped.wait(args.interval_s):
            try:
                _compact(compactor, context, written)
            except StoreError as error:
                log.warning("event=store_failed error=%s", error)
    rows = [
        {
            "from": merged.base_version,
            "to": merged.version,
            "num_changed": merged.stats.num_changed,
            "bytes": merged.num_bytes,
        }
        for merged in written
    ]
    skipped = [
        {"from": start, "to": stop, "reason": reason}
        for (start, stop), reason in sorted(compactor.skipped.items())
    ]
    num_bytes = sum(merged.num_bytes for merged in written)
    record = {
        "run": run.name,
        "newest": run.newest(),
        "written": rows,
        "bytes": num_bytes,
        "skipped": skipped,
    }
    lines = [
        f"{text.count(len(rows), 'merged patch', 'merged patches')} written, "
        f"{text.num_bytes(num_bytes)}"
    ]
    lines += [f"{row['from']} to {row['to']} left out: {row['reason']}" for row in skipped]
    context.console.result(record, lines)
    return exits.OK


def _compact(compactor: Compactor, context: Context, written: list[MergedPatch]) -> None:
    """Adds to `written` as it goes, so that a store that fails midway hides nothing."""
    done = 0
    with context.console.progress("merging", counts=True) as progress:

        def on_span(merged: MergedPatch | None) -> None:
            nonlocal done
            done += 1
            if merged is not None:
                written.append(merged)
            if progress is not None:
                progress(done, done + compactor.num_left)

        compactor.compact(on_span)
