"""The report and its table."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stitch.demo.long_requests import LongAnswer
from stitch.demo.report import Outcome, Proof, print_report, write_report
from stitch.demo.settings import DemoSettings
from stitch.demo.watch import Commit
from stitch.records import BlobRef, Manifest
from stitch.types import PatchStats, VersionSpan

DIGEST = "ab" * 16


def manifest(version: int) -> Manifest:
    return Manifest(
        run="demo",
        version=version,
        base_version=version - 1,
        kind="patch",
        digest_before=DIGEST,
        digest_after=DIGEST,
        schema_digest=DIGEST,
        blobs=(BlobRef(name="a.patch", num_bytes=30, blake3="0" * 64),),
        stats=PatchStats(num_elements=1000, num_changed=5, num_bytes=30),
        step=version,
        created_unix_s=1.0,
        writer="w",
        attempt="a",
        epoch=1,
    )


def commit(replica: str, version: int, served_s: float, *, caught_up: bool) -> Commit:
    return Commit(
        replica=replica,
        version=version,
        stage_ms=4.0,
        pause_ms=1.5,
        publish_to_served_s=served_s,
        caught_up=caught_up,
    )


def step(number: int, versions: list[int]) -> dict[str, Any]:
    return {
        "step": number,
        "reward": 0.25,
        "accuracy": 0.5,
        "loss": 0.0,
        "sample_versions": versions,
        "requests": 4,
        "retried": 1,
        "spanning": 2,
        "seconds": 3.0,
    }


def proof(name: str, **changes: Any) -> Proof:
    fields = {"version": 2, "digest": DIGEST, "joined": "start", "killed": False}
    return Proof(id=name, **{**fields, **changes})


def outcome(**changes: Any) -> Outcome:
    whole = Outcome(
        trainer_version=2,
        trainer_digest=DIGEST,
        base_digest="cd" * 16,
        proofs=(proof("r1"), proof("r3", joined="late")),
        steps=(step(1, [0]), step(2, [0, 1])),
        commits=(
            commit("r1", 1, 0.5, caught_up=True),
            commit("r2", 1, 0.7, caught_up=True),
            commit("r3", 1, 30.0, caught_up=False),
        ),
        manifests=(manifest(1), manifest(2)),
        view_bytes=2000,
        long_answers=(
            LongAnswer(replica="r1", spans=(VersionSpan(1, 0, 5), VersionSpan(2, 5, 9))),
            LongAnswer(replica="r1", spans=(VersionSpan(2, 0, 9),)),
        ),
        long_errors=(),
        long_retried=3,
    )
    return dataclasses.replace(whole, **changes)


def report_of(tmp_path: Path, result: Outcome) -> dict[str, Any]:
    path = tmp_path / "report.json"
    report = write_report(path, result, DemoSettings(), seconds=9.87)
    assert json.loads(path.read_text()) == report
    return report


def test_equal_digests_and_versions_are_bit_exact(tmp_path: Path) -> None:
    assert report_of(tmp_path, outcome())["bit_exact"] is True


@pytest.mark.parametrize("change", [{"digest": "00" * 16}, {"version": 1}])
def test_one_replica_that_differs_spoils_it(tmp_path: Path, change: dict[str, Any]) -> None:
    result = outcome(proofs=(proof("r1"), proof("r2", **change)))
    report = report_of(tmp_path, result)
    assert report["bit_exact"] is False
    assert "DIFFERS r2" in printed(report)


def test_no_replica_proves_nothing(tmp_path: Path) -> None:
    assert report_of(tmp_path, outcome(proofs=()))["bit_exact"] is False


def test_times_are_of_the_slowest_replica_that_was_not_catching_up(tmp_path: Path) -> None:
    first, second = report_of(tmp_path, outcome())["versions"]
    assert first["publish_to_served_s"] == 0.7
    assert first["replicas"] == ["r1", "r2"]
    assert (first["density"], first["patch_bytes"], first["share"]) == (0.005, 30, 0.015)
    assert second["pause_ms"] is None


def test_requests_and_versions_are_counted_over_rollouts_and_long_answers(tmp_path: Path) -> None:
    report = report_of(tmp_path, outcome())
    assert report["requests"] == {
        "total": 10,
        "rollouts": 8,
        "failed": 0,
        "retried": 5,
        "spanning_versions": 5,
    }
    assert report["versions_served"] == 3


def test_a_rejected_request_counts_as_failed(tmp_path: Path) -> None:
    assert report_of(tmp_path, outcome(long_errors=("HTTP 400",)))["requests"]["failed"] == 1


def printed(report: dict[str, Any]) -> str:
    out = io.StringIO()
    print_report(report, Path("report.json"), Console(file=out, width=120, highlight=False))
    return out.getvalue()


def test_the_table_has_a_line_per_version_and_the_proof_follows(tmp_path: Path) -> None:
    text = printed(report_of(tmp_path, outcome()))
    assert "0.500%" in text
    assert "30 B" in text
    assert "1.50%" in text
    assert "0.70 s" in text
    assert f"equal   r3 at version 2: {DIGEST}, joined late" in text
    assert "bit-exact: yes; 3 versions served; 10 requests, 0 failed" in text
