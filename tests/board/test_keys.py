"""Keys: as docs/protocol.md lists them, compared as numbers, and closed to path tricks."""

from __future__ import annotations

import pytest

from stitch.board import keys
from stitch.errors import UsageError

VERSIONS = [9, 10, 99, 100, 999_999, 1_000_000]


def test_keys_are_spelled_as_documented() -> None:
    assert keys.run_record("math") == "math/run.json"
    assert keys.schema("math", "ab12") == "math/schema-ab12.json.zst"
    assert keys.head("math") == "math/head.json"
    assert keys.manifest("math", 7) == "math/v/00000007/manifest.json"
    assert keys.anchor("math", 100) == "math/v/00000100/anchor.json"
    assert keys.blob("math", 7, "w-0.patch") == "math/v/00000007/w-0.patch"
    assert keys.heartbeat("math", "r1") == "math/replicas/r1.json"
    assert keys.epoch(3) == "epochs/00000003.json"
    assert keys.patch_step(3) == "v/00000003/manifest.json"
    assert keys.anchor_step(3) == "v/00000003/anchor.json"


def test_numbers_round_trip_and_sort_as_numbers() -> None:
    assert [keys.parse_number(keys.number(version)) for version in VERSIONS] == VERSIONS
    assert sorted(map(keys.number, reversed(VERSIONS))) == [keys.number(v) for v in VERSIONS]


@pytest.mark.parametrize(
    "stray",
    ["latest", "7", "0000007", "000000007", "-0000007", "+0000007", "0000000x", "", "１" * 8],
)
def test_stray_names_are_no_versions(stray: str) -> None:
    assert keys.parse_number(stray) is None


@pytest.mark.parametrize("version", [-1, 100_000_000, True, 1.0, "7"])
def test_versions_that_do_not_fit_are_refused(version: int) -> None:
    with pytest.raises(UsageError):
        keys.manifest("math", version)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/a", "a\\b", "a\0", "epochs", ".x"]
)
def test_run_names_that_are_not_one_plain_segment_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        keys.run_record(name)
    assert not keys.is_run_name(name)


@pytest.mark.parametrize("name", ["manifest.json", "anchor.json", "torn.json", "../x", "a/b", ""])
def test_blob_names_cannot_take_a_records_place(name: str) -> None:
    with pytest.raises(UsageError):
        keys.blob("math", 1, name)


def test_the_kind_of_a_key_is_known() -> None:
    kinds = {
        "m/run.json": "run", "m/head.json": "head", "m/schema-1.json.zst": "schema",
        "m/v/00000001/manifest.json": "manifest", "m/v/00000001/anchor.json": "anchor",
        "m/v/00000008/from-00000004.json": "merged", "m/v/00000008/from-4.json": "blob",
        "m/v/00000008/from-00000004-ab-0.patch": "blob",
        "m/v/00000001/w.patch": "blob", "m/assets/ab/config.json": "blob",
        "m/anchors.json": "anchors", "m/retention.json": "retention", "m/gc/ab.json": "mark",
        "m/replicas/r.json": "heartbeat", "epochs/00000001.json": "epoch",
        ".stitch-probe/1": "other",
    }  # fmt: skip
    assert {key: keys.kind_of(key) for key in kinds} == kinds
