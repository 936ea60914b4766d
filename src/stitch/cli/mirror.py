"""`stitch mirror`: copy a board's runs to another board, once or continuously."""

from __future__ import annotations

import argparse
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from stitch.cli import exits, flags, text
from stitch.cli.context import Context
from stitch.cli.signals import stopping

if TYPE_CHECKING:
    from stitch.board.copying import Copied

DESCRIPTION = """\
Copy the runs of the board SRC to the board DST, so that a region's replicas read from
their own store: blobs first, manifests last, then merged patches, anchors and epochs.
Goes on with new versions until it is stopped; --once ends when all there is has been
copied. May be killed and called again at any time, also several times at once. Nothing
that DST holds is overwritten: another manifest under the same version is an error.
Heartbeats stay where they are written."""
DEFAULT_INTERVAL_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="the board to copy: a directory or URL")
    parser.add_argument("target", metavar="DST", help="the board to copy to; made if missing")
    parser.add_argument("--once", action="store_true", help="copy what there is, and end")
    parser.add_argument(
        "--interval-s",
        type=flags.seconds,
        default=DEFAULT_INTERVAL_S,
        metavar="S",
        help=f"seconds between looks at SRC, one request each (default: {DEFAULT_INTERVAL_S:g})",
    )
    parser.add_argument(
        "--scratch", metavar="DIR", help="where large blobs wait on their way (default: system's)"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    from stitch.board import open_board
    from stitch.board.copying import BoardCopier, Copied, follow

    source, target = open_board(args.source, create=False), open_board(args.target)
    stopped = threading.Event()
    total = Copied()
    with stopping(stopped, not args.once), context.console.progress("copying") as progress:
        copier = BoardCopier(
            source,
            target,
            run=context.settings.run,
            scratch=Path(args.scratch) if args.scratch else None,
            progress=progress,
            stop=stopped.is_set,
        )
        if args.once:
            total.add(copier.copy())
        else:
            logging.getLogger("stitch.board").setLevel(logging.INFO)
            follow(copier, stopped, interval_s=args.interval_s, on_copied=total.add)
    record = {
        "source": source.url,
        "target": target.url,
        "newest": total.newest,
        "runs": total.runs,
        "versions": total.versions,
        "merged": total.merged,
        "anchors": total.anchors,
        "epochs": total.epochs,
        "bytes": total.num_bytes,
        "left_out": total.left_out,
    }
    context.console.result(record, _lines(total))
    return exits.OK


def _lines(total: Copied) -> list[str]:
    lines = [f"{name} is at version {newest}" for name, newest in sorted(total.newest.items())]
    lines.append(
        f"{text.count(total.versions, 'version')}, "
        f"{text.count(total.merged, 'merged patch', 'merged patches')} and "
        f"{text.count(total.anchors, 'anchor')} copied, {text.num_bytes(total.num_bytes)}"
    )
    return lines + [f"{key} left out: {reason}" for key, reason in sorted(total.left_out.items())]
