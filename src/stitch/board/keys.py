"""Every key of a board, built and read in this one place. See docs/protocol.md, "Keys".

Keys are ASCII paths relative to the board's root. Versions and epochs are written with eight
digits and always compared as numbers; whatever else lies beside them is ignored.
"""

from __future__ import annotations

import re
from typing import Literal

from stitch.errors import UsageError
from stitch.types import BLOB_NAME, RUN_NAME, check_run_name, check_version

Kind = Literal[
    "run",
    "schema",
    "manifest",
    "merged",
    "anchor",
    "blob",
    "head",
    "heartbeat",
    "anchors",
    "retention",
    "mark",
    "epoch",
    "other",
]

_EIGHT_DIGITS = re.compile(r"[0-9]{8}", re.ASCII)
_MERGED_RECORD = re.compile(r"from-([0-9]{8})\.json", re.ASCII)

PROBE_FOLDER = ".stitch-probe"
TEMPORARY_FOLDER = ".stitch-tmp"
"""Folders beside the runs. A run's name cannot start with a dot."""


def number(version: int) -> str:
    """The eight digits of a version or an epoch."""
    return f"{check_version(version):08d}"


def parse_number(segment: str) -> int | None:
    """The version or epoch that `segment` spells, or None for a stray name."""
    return int(segment) if _EIGHT_DIGITS.fullmatch(segment) else None


def parse_merged(name: str) -> int | None:
    """The version that the merged patch with the record `name` starts from, or None."""
    found = _MERGED_RECORD.fullmatch(name)
    return int(found.group(1)) if found else None


def segment(name: str, what: str) -> str:
    """`name`, or UsageError unless it is a plain file name without any path in it."""
    if not isinstance(name, str) or not BLOB_NAME.fullmatch(name):
        raise UsageError(f"{what} {name!r:.200} is not allowed as a name on the board")
    return name


def is_run_name(name: str) -> bool:
    return bool(RUN_NAME.fullmatch(name)) and name != "epochs"


def run_record(run: str) -> str:
    return f"{check_run_name(run)}/run.json"


def schema(run: str, digest: str) -> str:
    return f"{check_run_name(run)}/schema-{segment(digest, 'schema digest')}.json.zst"


def head(run: str) -> str:
    return f"{check_run_name(run)}/head.json"


def versions_folder(run: str) -> str:
    return f"{check_run_name(run)}/v"


def version_folder(run: str, version: int) -> str:
    return f"{versions_folder(run)}/{number(version)}"


def manifest(run: str, version: int) -> str:
    return f"{version_folder(run, version)}/manifest.json"


def torn_claim(run: str, version: int) -> str:
    """Created by the one writer that may delete a manifest torn by power loss."""
    return f"{version_folder(run, version)}/torn.json"


def anchor(run: str, version: int) -> str:
    return f"{version_folder(run, version)}/anchor.json"


def merged(run: str, start: int, version: int) -> str:
    """The record of the merged patch from version `start` to `version`."""
    return f"{version_folder(run, version)}/from-{number(start)}.json"


def merged_blob_name(start: int, attempt: str, part: int) -> str:
    """Name of a part of a merged patch, among the blobs of the version that it leads to."""
    return f"from-{number(start)}-{attempt}-{part}.patch"


def blob(run: str, version: int, name: str) -> str:
    """Key of a patch part or an anchor file. Names ending in .json belong to records."""
    if segment(name, "blob name").endswith(".json") and not name.startswith("anchor-"):
        raise UsageError(f"blob name {name!r} is not allowed: .json is for the board's records")
    return f"{version_folder(run, version)}/{name}"


def asset(run: str, name: str, blake3: str) -> str:
    """Assets are found by content, so that two writers of one name cannot meet."""
    return f"{check_run_name(run)}/assets/{segment(blake3, 'BLAKE3')}/{segment(name, 'asset name')}"


def heartbeats_folder(run: str) -> str:
    return f"{check_run_name(run)}/replicas"


def heartbeat(run: str, replica: str) -> str:
    return f"{heartbeats_folder(run)}/{segment(replica, 'replica id')}.json"


def anchor_list(run: str) -> str:
    """Which versions have an anchor: a hint that saves readers a listing."""
    return f"{check_run_name(run)}/anchors.json"


def retention(run: str) -> str:
    """What retention has removed, or is about to: a hint that saves readers requests."""
    return f"{check_run_name(run)}/retention.json"


def marks_folder(run: str) -> str:
    return f"{check_run_name(run)}/gc"


def mark(run: str, name: str) -> str:
    """A list of keys that may be deleted once it is old enough."""
    return f"{marks_folder(run)}/{segment(name, 'mark')}.json"


def epoch(epoch: int) -> str:
    return f"epochs/{number(epoch)}.json"


def epoch_end(epoch: int) -> str:
    """Created by the epoch's own publisher once nothing of it can be published any more."""
    return f"epochs/{number(epoch)}-ended.json"


def patch_step(version: int) -> str:
    """How routes and their `avoid` sets name the patch that leads to `version`."""
    return f"v/{number(version)}/manifest.json"


def merged_step(start: int, version: int) -> str:
    """How routes and their `avoid` sets name the merged patch from `start` to `version`."""
    return f"v/{number(version)}/from-{number(start)}.json"


def anchor_step(version: int) -> str:
    """How routes and their `avoid` sets name the anchor at `version`."""
    return f"v/{number(version)}/anchor.json"


def kind_of(key: str) -> Kind:
    """What lies at `key`: it names failpoints and decides how durable a write must be."""
    parts = key.split("/")
    match parts:
        case ["epochs", _]:
            return "epoch"
        case [_, "run.json"]:
            return "run"
        case [_, "head.json"]:
            return "head"
        case [_, "anchors.json"]:
            return "anchors"
        case [_, "retention.json"]:
            return "retention"
        case [_, "gc", _]:
            return "mark"
        case [_, name] if name.startswith("schema-"):
            return "schema"
        case [_, "replicas", _]:
            return "heartbeat"
        case [_, "v", _, "manifest.json"]:
            return "manifest"
        case [_, "v", _, "anchor.json"]:
            return "anchor"
        case [_, "v", _, name] if _MERGED_RECORD.fullmatch(name):
            return "merged"
        case [_, "v", _, _] | [_, "assets", _, _]:
            return "blob"
    return "other"
