"""Merged patches on the board: where they lie, and what is accepted as one."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pytest
from board_kit import NO_WAITS, digest, merged_patch, new_run, publish_through, put_merged

from stitch.board import Board, Run, keys, spans
from stitch.errors import (
    BaseMismatchError,
    CorruptBlobError,
    SchemaMismatchError,
    UsageError,
    VersionNotFoundError,
)
from stitch.testing.faults import FaultyStore


@pytest.fixture
def run(board: Board) -> Run:
    made = new_run(board)
    publish_through(made, 9)
    return made


def test_spans_are_nested_or_apart_and_found_from_their_start() -> None:
    all_spans = list(spans.spans(70))
    assert len(all_spans) == len(set(all_spans))
    for (a, b), (c, d) in combinations(all_spans, 2):
        assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)
    by_start = {(start, end) for start in range(70) for end in spans.ends(start, 70)}
    assert by_start == set(all_spans)
    assert {(start, end) for end in range(71) for start in spans.starts(end)} == set(all_spans)
    assert all(spans.is_span(*span) for span in all_spans)
    within = {(a, b) for a, b in all_spans if a >= 16 and b <= 32 and (a, b) != (16, 32)}
    assert set(spans.inside((16, 32))) == within
    others = ((0, 2), (2, 6), (4, 12), (0, 12), (4, 4), (8, 4))
    assert not any(spans.is_span(*span) for span in others)
    assert list(spans.ends(0, 70)) == [64, 32, 16, 8, 4]
    assert list(spans.ends(64, 70)) == [68]
    assert list(spans.ends(66, 70)) == []
    assert list(spans.ends(0, 3)) == []


def test_a_merged_patch_is_created_once_and_read_by_all(run: Run) -> None:
    assert run.merged(4, 8) is None
    first = put_merged(run, 4, 8)
    assert put_merged(run, 4, 8) == first
    reader = run.board.open_run("math")
    assert reader.merged(4, 8) == first
    assert reader.read_blob(8, first.blobs[0]) == b"x" * 5
    assert reader.newest() == 9


def test_a_reader_asks_again_only_when_told_to(run: Run) -> None:
    put_merged(run, 4, 8)
    store = FaultyStore(run.board.store)
    reader = Board(store, patience=NO_WAITS).open_run("math")
    assert reader.merged(4, 8) is not None
    store.forget_requests()
    assert reader.merged(4, 8) is not None
    assert store.num_requests == 0
    run.board.store.delete(keys.merged("math", 4, 8))
    reader.forget_merged(4, 8)
    assert reader.merged(4, 8) is None


def test_what_leads_elsewhere_or_lacks_its_blobs_is_refused(run: Run) -> None:
    ref = run.put_blob(8, "from-00000004-x-0.patch", b"x")
    good = merged_patch(run, 4, 8, (ref,))
    refused = [
        (dataclasses.replace(good, digest_before=digest(3)), BaseMismatchError),
        (dataclasses.replace(good, digest_after=digest(9)), BaseMismatchError),
        (dataclasses.replace(good, schema_digest="0" * 32), SchemaMismatchError),
        (dataclasses.replace(good, base_version=5), UsageError),
        (dataclasses.replace(good, run="other"), UsageError),
        (merged_patch(run, 8, 12, (ref,)), VersionNotFoundError),
        (dataclasses.replace(good, blobs=(dataclasses.replace(ref, num_bytes=2),)),
         CorruptBlobError),
        (dataclasses.replace(good, blobs=(dataclasses.replace(ref, name="gone.patch"),)),
         CorruptBlobError),
    ]  # fmt: skip
    for record, error in refused:
        with pytest.raises(error):
            run.commit_merged(record)
    assert run.merged(4, 8) is None
    assert run.commit_merged(good) == good


def test_a_reply_that_is_lost_changes_nothing(run: Run) -> None:
    store = FaultyStore(run.board.store)
    store.lose_reply("from-00000004.json")
    writer = Board(store, patience=NO_WAITS).open_run("math")
    assert put_merged(writer, 4, 8) == run.merged(4, 8)
