"""`stitch fsck`: check everything that a run has on its board."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from stitch.cli import exits, text
from stitch.cli.context import Context
from stitch.cli.flags import positive_int

if TYPE_CHECKING:
    from stitch.board.keeping.scrub import Reached, Scrubbed

DESCRIPTION = """\
Read every record and blob of a run and check sizes, BLAKE3 and the chain of digests.
Says what is damaged, and which versions can still be reached: from the base, or from
which anchor, over patches and merged patches that are intact. Changes nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=positive_int, default=4, metavar="N", help="reads at a time (default: 4)"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    from stitch.board import keys
    from stitch.board.keeping.scrub import scrub

    run = context.run
    with context.console.progress("reading") as progress:
        found = scrub(run, threads=args.threads, progress=progress)
    if (refusal := run.refusal) is not None:  # it lies where the next version would
        found.damaged[keys.manifest(run.name, found.newest + 1)] = str(refusal)
    record = {
        "run": run.name,
        "newest": found.newest,
        "objects": found.num_objects,
        "bytes": found.num_bytes,
        "damaged": [{"key": key, "problem": found.damaged[key]} for key in sorted(found.damaged)],
        "removed": len(found.removed),
        "unnamed": found.unnamed,
        "reached": [vars(part) for part in found.reached],
        "lost": [list(part) for part in found.lost],
        "signers": run.board.signers,
    }
    context.console.result(record, _lines(found) + _signers(run.board.signers))
    return exits.UNEQUAL if found.damaged else exits.OK


def _lines(found: Scrubbed) -> list[str]:
    size = text.num_bytes(found.num_bytes)
    lines = [f"{text.count(found.num_objects, 'object')} read, {size} of blobs"]
    lines += [f"damaged: {found.damaged[key]}" for key in sorted(found.damaged)]
    if found.removed:
        lines.append(f"retention removed {text.count(len(found.removed), 'patch', 'patches')}")
    if found.unnamed:
        lines.append(f"no record names {text.count(len(found.unnamed), 'blob')}")
    rows = [[_range(part), _starts(part)] for part in found.reached]
    return [*lines, "", *text.table(["versions", "reached from"], rows)]


def _signers(key_ids: list[str] | None) -> list[str]:
    """Who signed what was read; nothing where signatures were not checked."""
    return [] if key_ids is None else ["", f"signed by {', '.join(key_ids) or 'nobody'}"]


def _range(part: Reached) -> str:
    return str(part.first) if part.first == part.last else f"{part.first} to {part.last}"


def _starts(part: Reached) -> str:
    anchor = [] if part.from_anchor is None else [f"anchor {part.from_anchor}"]
    return ", ".join((["base"] if part.from_base else []) + anchor) or "nowhere"
