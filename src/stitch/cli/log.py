"""`stitch log`: versions, newest first."""

from __future__ import annotations

import argparse

from stitch.cli import exits, text
from stitch.cli.context import Context
from stitch.cli.flags import positive_int
from stitch.records import Manifest

DESCRIPTION = "List the run's versions, newest first."
DEFAULT_COUNT = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n",
        "--count",
        type=positive_int,
        default=DEFAULT_COUNT,
        metavar="N",
        help=f"versions to list (default: {DEFAULT_COUNT})",
    )


def run(args: argparse.Namespace, context: Context) -> int:
    run = context.run
    newest = run.newest()
    first = max(1, newest - args.count + 1)
    manifests = [run.manifest(version) for version in range(newest, first - 1, -1)]
    anchors = set(run.anchors())
    view_bytes = run.record.num_bytes
    retention = run.retention()
    rows = [
        version_record(manifest, view_bytes, manifest.version in anchors)
        | {"removed": retention is not None and not retention.has_patch(manifest.version)}
        for manifest in manifests
    ]
    if first == 1 and len(rows) < args.count:
        rows.append(
            {
                "version": 0,
                "step": None,
                "created_unix_s": run.record.created_unix_s,
                "num_changed": None,
                "density": None,
                "bytes": view_bytes,
                "share_of_view": 1.0,
                "anchor": 0 in anchors,
                "removed": False,
                "digest": run.record.base_digest,
            }
        )
    record = {"run": run.name, "newest": newest, "view_bytes": view_bytes, "versions": rows}
    context.console.result(record, text.table(HEADER, [_row(row) for row in rows]))
    return exits.OK


HEADER = ["version", "step", "published (UTC)", "changed", "bytes", "share", ""]


def version_record(manifest: Manifest, view_bytes: int, anchor: bool) -> dict[str, object]:
    return {
        "version": manifest.version,
        "step": manifest.step,
        "created_unix_s": manifest.created_unix_s,
        "num_changed": manifest.stats.num_changed,
        "density": manifest.stats.density,
        "bytes": manifest.num_bytes,
        "share_of_view": manifest.num_bytes / view_bytes if view_bytes else 0.0,
        "anchor": anchor,
        "digest": manifest.digest_after,
    }


def _row(row: dict[str, object]) -> list[object]:
    density = row["density"]
    marks = ["base"] if row["version"] == 0 else []
    marks += ["anchor"] if row["anchor"] else []
    marks += ["patch removed"] if row["removed"] else []
    return [
        row["version"],
        row["step"],
        text.utc(float(str(row["created_unix_s"]))),
        None if density is None else text.percent(float(str(density))),
        text.num_bytes(float(str(row["bytes"]))),
        text.percent(float(str(row["share_of_view"]))),
        ", ".join(marks) or " ",
    ]
