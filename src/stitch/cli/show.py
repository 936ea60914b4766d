"""`stitch show [VERSION]`: everything about one version."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from stitch.cli import exits, text
from stitch.cli.context import Context, parse_version
from stitch.errors import UsageError

if TYPE_CHECKING:
    from stitch.board import Run

DESCRIPTION = "Show everything the board says about one version; 0 is the run's base."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "version", metavar="VERSION", nargs="?", default="latest", help="default: latest"
    )


def run(args: argparse.Namespace, context: Context) -> int:
    from stitch.board import keys

    run = context.run
    version = parse_version(args.version, run)
    record = _base(run) if version == 0 else _version(run, version)
    anchor = run.anchor(version)
    retention = run.retention()
    has_patch = version == 0 or retention is None or retention.has_patch(version)
    record["patch_removed"] = not has_patch
    record["signed_by"] = run.board.signed_by(
        keys.manifest(run.name, version) if version else keys.run_record(run.name)
    )
    record["merged"] = merged_to(run, version)
    record["anchor"] = None if anchor is None else json.loads(anchor.to_json_bytes())
    context.console.result(record, _lines(record))
    return exits.OK


def _version(run: Run, version: int) -> dict[str, object]:
    manifest = run.manifest(version)
    record: dict[str, object] = json.loads(manifest.to_json_bytes())
    record["bytes"] = manifest.num_bytes
    record["density"] = manifest.stats.density
    record["bits_per_changed_element"] = manifest.stats.bits_per_changed_element
    record["share_of_view"] = manifest.num_bytes / max(1, run.record.num_bytes)
    return record


def merged_to(run: Run, version: int) -> list[dict[str, object]]:
    """The merged patches that lead to a version; one that cannot be read is listed with why."""
    from stitch.board import spans

    found: list[dict[str, object]] = []
    for start in spans.starts(version):
        try:
            merged = run.merged(start, version)
        except UsageError as error:
            found.append({"from": start, "error": str(error)})
            continue
        if merged is not None:
            found.append({"from": start, "bytes": merged.num_bytes, "writer": merged.writer})
    return found


def _base(run: Run) -> dict[str, object]:
    record: dict[str, object] = json.loads(run.record.to_json_bytes())
    record |= {"version": 0, "kind": "base", "digest_after": run.record.base_digest}
    record["num_tensors"] = len(run.schema)
    return record


def _lines(record: dict[str, object]) -> list[str]:
    """Every field; lists of blobs as a table of their own."""
    plain = [
        (name, _shown(name, value)) for name, value in record.items() if not isinstance(value, list)
    ]
    lines = text.fields(plain)
    for name in ("blobs", "assets"):
        rows = record.get(name)
        if isinstance(rows, list) and rows:
            cells = [[row["name"], row["num_bytes"], row["blake3"]] for row in rows]
            lines += ["", *text.table([name, "bytes", "blake3"], cells)]
    merged = record.get("merged")
    if isinstance(merged, list) and merged:
        cells = [[row["from"], row.get("bytes"), row.get("error", "")] for row in merged]
        lines += ["", *text.table(["merged from", "bytes", ""], cells)]
    return lines


def _shown(name: str, value: object) -> object:
    if name.endswith("_unix_s") and isinstance(value, int | float):
        return f"{text.utc(value)} UTC"
    if name in ("density", "share_of_view") and isinstance(value, float):
        return text.percent(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner != [])
    return value
