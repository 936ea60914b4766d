"""Routes: the cheapest way in bytes, around what is known to be bad."""

from __future__ import annotations

from itertools import pairwise

import pytest
from board_kit import NO_WAITS, SCHEMA, digest, manifest, new_run, publish
from hypothesis import given
from hypothesis import strategies as st

from stitch.board import AnchorStep, Board, PatchStep, Route, Run, Step, keys, plan_route
from stitch.board.routes import cheapest
from stitch.errors import NoRouteError
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


def test_the_walk_back_stops_where_no_cheaper_route_can_follow(memory_board: Board) -> None:
    run = run_of(memory_board, [60] * 40)
    add_anchor(run, 38)
    store = FaultyStore(memory_board.store)
    reader = Board(store, patience=NO_WAITS).open_run("math")
    store.forget_requests()
    assert shape(plan_route(reader, 0, 40)) == ["38/anchor", "39/manifest", "40/manifest"]
    assert store.num_requests < 12


sizes = st.integers(1, 200)


@given(
    patches=st.lists(sizes | st.none(), min_size=1, max_size=8),
    anchors=st.dictionaries(st.integers(0, 8), sizes, max_size=4),
    have=st.none() | st.integers(0, 8),
    want=st.integers(0, 8),
)
def test_the_cheapest_route_is_as_cheap_as_an_exhaustive_search_finds(
    patches: list[int | None], anchors: dict[int, int], have: int | None, want: int
) -> None:
    steps: list[Step] = [AnchorStep(anchor_record(v, n)) for v, n in anchors.items()]
    run = FAKE_RUN
    for version, num_bytes in enumerate(patches, 1):
        if num_bytes is not None:
            blob = BlobRef(name="w.patch", num_bytes=num_bytes, blake3="ab" * 32)
            steps.append(PatchStep(manifest(run, version, (blob,))))
    route = cheapest(steps, have, want)

    def cost_to(version: int) -> float:
        if version == have:
            return 0.0
        costs = [float("inf")]
        costs += [step.num_bytes for step in steps
                  if isinstance(step, AnchorStep) and step.to_version == version]  # fmt: skip
        costs += [step.num_bytes + cost_to(version - 1) for step in steps
                  if isinstance(step, PatchStep) and step.to_version == version]  # fmt: skip
        return min(costs)

    expected = cost_to(want)
    if route is None:
        assert expected == float("inf")
    else:
        assert route.num_bytes == expected
        assert all(b.from_version == a.to_version for a, b in pairwise(route.steps))
        assert not route.steps or route.steps[0].from_version in (have, None)
        assert not route.steps or route.steps[-1].to_version == want


class _FakeRun:
    name = "math"

    class record:
        schema_digest = SCHEMA.digest


FAKE_RUN: Run = _FakeRun()  # type: ignore[assignment]
