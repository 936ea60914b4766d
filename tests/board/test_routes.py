"""Routes: the cheapest way in bytes, around what is known to be bad."""

from __future__ import annotations

import dataclasses
import secrets
from itertools import pairwise

import pytest
from board_kit import NO_WAITS, SCHEMA, digest, new_run, publish, put_merged
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.board import Board, MergedStep, PatchStep, Route, Run, keys, plan_route, spans
from stitch.board.stores.store import memory_store
from stitch.errors import CorruptRecordError, NoRouteError
from stitch.records import AnchorRecord, BlobRef
from stitch.testing.faults import FaultyStore

VIEW_BYTES = SCHEMA.num_bytes


def add_anchor(run: Run, version: int, num_bytes: int = VIEW_BYTES) -> None:
    """An anchor's record; its file is not needed for planning."""
    data = anchor_record(version, num_bytes).to_json_bytes()
    run.board.store.put(keys.anchor(run.name, version), data, mode="create")


def anchor_record(version: int, num_bytes: int) -> AnchorRecord:
    file = BlobRef(name="anchor-1-model.safetensors", num_bytes=num_bytes, blake3="ab" * 32)
    return AnchorRecord(
        run="math", version=version, digest=digest(version), schema_digest=SCHEMA.digest,
        files=(file,), num_bytes=num_bytes, created_unix_s=0.0, writer="w",
    )  # fmt: skip


def run_of(board: Board, sizes: list[int]) -> Run:
    """A run whose patch to version i + 1 has sizes[i] bytes."""
    run = new_run(board)
    for version, num_bytes in enumerate(sizes, 1):
        publish(run, version, b"x" * num_bytes)
    return run


def shape(route: Route) -> list[str]:
    return [step.key.removeprefix("v/").removesuffix(".json").lstrip("0") for step in route.steps]


def test_small_patches_are_taken_one_after_the_other(memory_board: Board) -> None:
    run = run_of(memory_board, [5, 6, 7])
    route = plan_route(run, 0, 3)
    assert shape(route) == ["1/manifest", "2/manifest", "3/manifest"]
    assert route.num_bytes == 18
    assert [step.from_version for step in route.steps] == [0, 1, 2]
    assert all(isinstance(step, PatchStep) for step in route.steps)
    assert plan_route(run, 2, 3).num_bytes == 7
    assert plan_route(run, 3, 3) == Route(())


def test_one_step_costs_one_request_and_no_listing(memory_board: Board) -> None:
    run_of(memory_board, [5, 5])
    store = FaultyStore(memory_board.store)
    reader = Board(store, patience=NO_WAITS).open_run("math")
    store.forget_requests()
    plan_route(reader, 1, 2)
    assert store.requests == [("get", keys.manifest("math", 2))]


def test_an_anchor_is_taken_where_patches_cost_more(memory_board: Board) -> None:
    run = run_of(memory_board, [VIEW_BYTES + 1] * 4 + [3, 3])
    assert plan_route(run, 0, 6).num_bytes == 4 * VIEW_BYTES + 10
    add_anchor(run, 4)
    assert shape(plan_route(run, 0, 6)) == ["4/anchor", "5/manifest", "6/manifest"]
    assert shape(plan_route(run, 3, 6)) == ["4/anchor", "5/manifest", "6/manifest"]
    assert shape(plan_route(run, 4, 6)) == ["5/manifest", "6/manifest"]


def test_the_best_of_several_anchors_is_found(memory_board: Board) -> None:
    run = run_of(memory_board, [10, 100, 100, 10, 100])
    add_anchor(run, 5, 1000)
    add_anchor(run, 4, 150)
    add_anchor(run, 2, VIEW_BYTES)
    assert shape(plan_route(run, 0, 5)) == ["4/anchor", "5/manifest"]


def test_without_weights_a_route_begins_at_an_anchor(memory_board: Board) -> None:
    run = run_of(memory_board, [5, 5, 5])
    with pytest.raises(NoRouteError, match=r"no route from nothing to version 3: .*/models/base"):
        plan_route(run, None, 3)
    add_anchor(run, 0)
    assert shape(plan_route(run, None, 3)) == [
        "/anchor", "1/manifest", "2/manifest", "3/manifest"
    ]  # fmt: skip
    add_anchor(run, 2)
    assert shape(plan_route(run, None, 3)) == ["2/anchor", "3/manifest"]


def test_going_back_takes_an_anchor_at_or_below_the_goal(memory_board: Board) -> None:
    run = run_of(memory_board, [5, 5, 5, 5])
    with pytest.raises(NoRouteError, match="from version 4 to version 3"):
        plan_route(run, 4, 3)
    add_anchor(run, 2)
    add_anchor(run, 4)
    assert shape(plan_route(run, 4, 3)) == ["2/anchor", "3/manifest"]


def test_a_bad_patch_is_avoided_by_a_later_anchor_or_named(memory_board: Board) -> None:
    run = run_of(memory_board, [5, 5, 5, 5])
    avoid = frozenset({plan_route(run, 1, 2).steps[0].key})
    with pytest.raises(NoRouteError, match="the patch of version 2 is known to be bad"):
        plan_route(run, 1, 4, avoid=avoid)
    add_anchor(run, 2)
    assert shape(plan_route(run, 1, 4, avoid=avoid)) == ["2/anchor", "3/manifest", "4/manifest"]
    both = frozenset({"v/00000002"})
    with pytest.raises(NoRouteError, match="the anchor of version 2 is known to be bad"):
        plan_route(run, 1, 4, avoid=both)
    add_anchor(run, 3)
    assert shape(plan_route(run, 1, 4, avoid=both)) == ["3/anchor", "4/manifest"]


@pytest.mark.parametrize("damage", [b"", b"{", None])
def test_a_damaged_manifest_is_a_hole_that_only_an_anchor_closes(
    memory_board: Board, damage: bytes | None
) -> None:
    run_of(memory_board, [5] * 6)
    key = keys.manifest("math", 3)
    if damage is None:
        memory_board.store.delete(key)
    else:
        memory_board.store.put(key, damage, mode="overwrite")
    reader = memory_board.open_run("math")
    with pytest.raises(NoRouteError, match="version 3" if damage is None else key):
        plan_route(reader, 2, 6)
    add_anchor(reader, 4)
    assert shape(plan_route(reader, 2, 6)) == ["4/anchor", "5/manifest", "6/manifest"]


def test_a_damaged_anchor_is_passed_over(memory_board: Board) -> None:
    run = run_of(memory_board, [5, 5])
    memory_board.store.put(keys.anchor("math", 2), b"\0" * 9, mode="create")
    with pytest.raises(NoRouteError, match=r"v/00000002/anchor\.json"):
        plan_route(run, None, 2)
    add_anchor(run, 1)
    assert shape(plan_route(run, None, 2)) == ["1/anchor", "2/manifest"]


def test_a_version_that_is_not_published_has_no_route(memory_board: Board) -> None:
    run = run_of(memory_board, [5])
    with pytest.raises(NoRouteError, match="no version 2; the newest is 1"):
        plan_route(run, 0, 2)


def test_looking_for_patches_ends_where_no_cheaper_route_can_follow(memory_board: Board) -> None:
    run = run_of(memory_board, [60] * 40)
    add_anchor(run, 38)
    store = FaultyStore(memory_board.store)
    reader = Board(store, patience=NO_WAITS).open_run("math")
    store.forget_requests()
    assert shape(plan_route(reader, 0, 40)) == ["38/anchor", "39/manifest", "40/manifest"]
    assert store.num_requests < 20


# --- merged patches ----------------------------------------------------------------------------


def merge_all(run: Run, newest: int, num_bytes: int = 2) -> None:
    for start, stop in spans.spans(newest):
        put_merged(run, start, stop, num_bytes)


def test_a_replica_far_behind_takes_as_many_steps_as_its_distance_has_digits(
    memory_board: Board,
) -> None:
    run_of(memory_board, [3] * 70)
    merge_all(memory_board.open_run("math"), 70)
    store = FaultyStore(memory_board.store)
    for have, want, expected in [
        (0, 64, ["64/from-00000000"]),
        (3, 70, ["4/manifest", "8/from-00000004", "16/from-00000008", "32/from-00000016",
                 "64/from-00000032", "68/from-00000064", "69/manifest", "70/manifest"]),
        (56, 64, ["64/from-00000056"]),
    ]:  # fmt: skip
        reader = Board(store, patience=NO_WAITS).open_run("math")
        store.forget_requests()
        route = plan_route(reader, have, want)
        assert shape(route) == expected
        # A span or a patch at each place, and the manifests that prove where the spans lead.
        assert store.num_requests <= 3 * len(expected) + 3
        assert store.counts["list"] == 0


def test_the_longest_span_that_exists_is_taken(memory_board: Board) -> None:
    run = run_of(memory_board, [9] * 16)
    put_merged(run, 0, 4, 20)
    put_merged(run, 8, 16, 30)
    route = plan_route(run, 0, 16)
    assert shape(route) == [
        "4/from-00000000", "5/manifest", "6/manifest", "7/manifest", "8/manifest",
        "16/from-00000008",
    ]  # fmt: skip
    assert isinstance(route.steps[0], MergedStep)
    assert route.num_bytes == 20 + 4 * 9 + 30


def test_a_bad_merged_patch_gives_way_to_its_parts(memory_board: Board) -> None:
    run = run_of(memory_board, [9] * 8)
    merge_all(run, 8)
    avoid = {keys.merged_step(0, 8)}
    assert shape(plan_route(run, 0, 8, avoid=frozenset(avoid))) == [
        "4/from-00000000", "8/from-00000004"
    ]  # fmt: skip
    avoid.add(keys.merged_step(4, 8))
    assert shape(plan_route(run, 0, 8, avoid=frozenset(avoid)))[1:] == [
        "5/manifest", "6/manifest", "7/manifest", "8/manifest"
    ]  # fmt: skip
    avoid.add(keys.patch_step(6))
    with pytest.raises(NoRouteError, match="the merged patch from 4 to 8 is known to be bad"):
        plan_route(run, 0, 8, avoid=frozenset(avoid))


def test_a_merged_patch_leads_over_a_version_whose_patch_is_bad(memory_board: Board) -> None:
    run = run_of(memory_board, [9] * 8)
    put_merged(run, 4, 8, 20)
    avoid = frozenset({keys.patch_step(6)})
    assert shape(plan_route(run, 3, 8, avoid=avoid)) == ["4/manifest", "8/from-00000004"]


@pytest.mark.parametrize("damage", ["torn", "elsewhere", "other run"])
def test_a_damaged_record_of_a_merged_patch_is_passed_over(
    memory_board: Board, damage: str
) -> None:
    run = run_of(memory_board, [9] * 4)
    record = put_merged(run, 0, 4)
    damaged = {
        "torn": b"\0" * 40,
        "elsewhere": dataclasses.replace(record, digest_after="f" * 32).to_json_bytes(),
        "other run": dataclasses.replace(record, run="other").to_json_bytes(),
    }
    memory_board.store.put(keys.merged("math", 0, 4), damaged[damage], mode="overwrite")
    reader = memory_board.open_run("math")
    with pytest.raises(CorruptRecordError, match="from-00000000"):
        reader.merged(0, 4)
    assert len(plan_route(reader, 0, 4).steps) == 4


def test_an_anchor_may_be_left_by_a_merged_patch(memory_board: Board) -> None:
    run = run_of(memory_board, [VIEW_BYTES + 1] * 12)
    add_anchor(run, 4)
    put_merged(run, 4, 8, VIEW_BYTES)
    assert shape(plan_route(run, 0, 9)) == ["4/anchor", "8/from-00000004", "9/manifest"]


@given(
    newest=st.integers(1, 20),
    patches=st.lists(st.integers(1, 200), min_size=20, max_size=20),
    shares=st.dictionaries(st.sampled_from(list(spans.spans(20))), st.floats(0.05, 1.0)),
    anchor=st.none() | st.tuples(st.integers(0, 20), st.integers(1, 900)),
    avoid=st.sets(st.integers(1, 20), max_size=2),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_the_route_is_as_cheap_as_an_exhaustive_search_finds(
    newest: int,
    patches: list[int],
    shares: dict[tuple[int, int], float],
    anchor: tuple[int, int] | None,
    avoid: set[int],
    data: st.DataObject,
) -> None:
    run = run_of(Board(memory_store(secrets.token_hex(8)), patience=NO_WAITS), patches[:newest])
    bad = {keys.patch_step(version) for version in avoid}
    edges = {
        (version - 1, version): patches[version - 1]
        for version in range(1, newest + 1)
        if version not in avoid
    }
    for start, stop in sorted(shares, key=lambda span: span[1] - span[0]):
        if stop > newest:
            continue
        replaced = _cheapest(edges, start, stop)
        whole = replaced if replaced < float("inf") else sum(patches[start:stop])
        num_bytes = max(1, int(whole * shares[start, stop]))
        edges[start, stop] = num_bytes
        put_merged(run, start, stop, num_bytes)
    want = data.draw(st.integers(0, newest), label="want")
    have = data.draw(st.none() | st.integers(0, newest), label="have")
    costs = [] if have is None or have > want else [_cheapest(edges, have, want)]
    if anchor is not None and anchor[0] <= newest:
        add_anchor(run, *anchor)
        costs += [anchor[1] + _cheapest(edges, anchor[0], want)] if anchor[0] <= want else []
    expected = 0 if have == want else min(costs, default=float("inf"))
    try:
        route = plan_route(run, have, want, avoid=frozenset(bad))
    except NoRouteError:
        assert expected == float("inf")
        return
    if have is not None and costs[:1] and costs[0] <= VIEW_BYTES:
        expected = 0 if have == want else costs[0]  # no anchor is looked for
    assert route.num_bytes == expected
    assert all(b.from_version == a.to_version for a, b in pairwise(route.steps))
    assert not route.steps or route.steps[0].from_version in (have, None)
    assert not route.steps or route.steps[-1].to_version == want


def _cheapest(edges: dict[tuple[int, int], int], have: int, want: int) -> float:
    best: dict[int, float] = {have: 0.0}
    for place in range(have + 1, want + 1):
        costs = (
            best[start] + num_bytes
            for (start, stop), num_bytes in edges.items()
            if stop == place and start in best
        )
        best[place] = min(costs, default=float("inf"))
    return best[want] if want >= have else float("inf")
