"""Stage, commit and undo on ranks: what is refused, what is restored, what is answered."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from placement_kit import (
    Layout,
    Ranks,
    built,
    checkpoint,
    live_bits,
    pairs,
    random_update,
    same_bits,
)

from stitch.codec import DigestState, TensorUpdate, UpdateSet
from stitch.engines.placement import pile as pile_module
from stitch.engines.placement.digest import block_terms
from stitch.engines.placement.pile import Pile
from stitch.engines.ranks import lanes as lanes_module
from stitch.engines.ranks import port
from stitch.engines.ranks.agreement import Agreement
from stitch.errors import EngineError, FatalReplicaError
from stitch.tensors import HostWeights

TWO = Layout(world=2)


@pytest.fixture
def weights() -> HostWeights:
    return checkpoint(TWO)


@pytest.fixture
def ranks(weights: HostWeights) -> Ranks:
    return Ranks(TWO, weights)


def bits(ranks: Ranks) -> list[dict[str, Any]]:
    return [live_bits(model) for model in ranks.models]


def unchanged(ranks: Ranks, before: list[dict[str, Any]]) -> bool:
    return all(same_bits(a, b) for a, b in zip(before, bits(ranks), strict=True))


def error(answers: list[dict[str, Any]]) -> str:
    """The type of the error that the ranks agree on."""
    (kind,) = {answer["type"] for answer in answers}
    return kind


def test_old_words_that_are_not_the_live_ones_are_refused(ranks: Ranks) -> None:
    other = checkpoint(TWO, seed=5)
    answers = ranks.stage("a", random_update(other, 0))
    assert error(answers) == "EngineError"
    assert "not the live ones" in answers[0]["error"]
    assert all(a["staged"] is None for a in ranks.call("describe"))
    assert error(ranks.call("commit", "a")) == "EngineError"


def test_parts_come_in_any_order_and_twice(weights: HostWeights, ranks: Ranks) -> None:
    update = random_update(weights, 0)
    parts = [UpdateSet([item]).to_bytes(ranks.schema) for item in update.updates]
    for number in reversed(range(len(parts))):
        for _ in range(2):
            assert all(a["ok"] for a in ranks.call("stage_part", "a", number, parts[number]))
    assert all(a["ok"] for a in ranks.call("seal", "a", len(parts), update.num_changed))
    assert all(a["ok"] for a in ranks.call("commit", "a"))
    update.apply(weights)
    assert (ranks.digest().lanes == DigestState.of(weights).lanes).all()


@pytest.mark.parametrize("fault", ["missing", "changed", "count", "garbage", "number", "schema"])
def test_parts_that_do_not_fit_are_refused(weights: HostWeights, ranks: Ranks, fault: str) -> None:
    update = random_update(weights, 0)
    data = update.to_bytes(ranks.schema)
    before = bits(ranks)
    ranks.call("stage_part", "a", 0, data)
    if fault == "missing":
        answers = ranks.call("seal", "a", 2, update.num_changed)
    elif fault == "changed":
        answers = ranks.call("stage_part", "a", 0, random_update(weights, 1).to_bytes(ranks.schema))
    elif fault == "count":
        answers = ranks.call("seal", "a", 1, update.num_changed + 1)
    elif fault == "garbage":
        answers = ranks.call("stage_part", "a", 1, data[:-3])
    elif fault == "number":
        answers = ranks.call("stage_part", "a", -1, data)
    else:
        other = checkpoint(Layout(tied=False))
        answers = ranks.call("stage_part", "a", 1, random_update(other, 0).to_bytes(other.schema))
    assert not any(a["ok"] for a in answers)
    assert error(ranks.call("commit", "a")) == "EngineError"
    assert unchanged(ranks, before)


def test_parts_are_read_from_files_of_this_user(
    weights: HostWeights, ranks: Ranks, tmp_path: Path
) -> None:
    update = random_update(weights, 0)
    path = tmp_path / "part"
    path.write_bytes(update.to_bytes(ranks.schema))
    link = tmp_path / "link"
    link.symlink_to(path)
    for wrong in (link, tmp_path, tmp_path / "none"):
        assert error(ranks.call("stage_part", "a", 0, str(wrong))) == "EngineError"
    assert all(a["ok"] for a in ranks.call("stage_part", "a", 0, str(path)))
    path.unlink()
    assert all(a["ok"] for a in ranks.call("seal", "a", 1, update.num_changed))


def test_a_commit_happens_once_and_can_be_undone_until_the_next_stage(
    weights: HostWeights, ranks: Ranks
) -> None:
    before = bits(ranks)
    first = random_update(weights, 0)
    ranks.stage("a", first)
    assert all(a["ok"] for a in ranks.call("commit", "a"))
    after = bits(ranks)
    assert all(a["write_ms"] == 0 for a in ranks.call("commit", "a"))
    assert [a["undone"] for a in ranks.call("undo", "other")] == [False, False]
    assert [a["undone"] for a in ranks.call("undo", "a")] == [True, True]
    assert unchanged(ranks, before)
    assert [a["undone"] for a in ranks.call("undo", "a")] == [False, False]
    ranks.stage("b", first)
    ranks.call("commit", "b")
    first.apply(weights)
    ranks.stage("c", random_update(weights, 1))
    assert [a["undone"] for a in ranks.call("undo", "b")] == [False, False]
    ranks.call("discard")
    assert unchanged(ranks, after)


class Failing:
    """Makes the n-th write of a pile fail, and the writes after it as well if asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, *, for_good: bool) -> None:
        self.left = at
        put = Pile.put

        def failing(pile: Pile, where: Any, values: Any) -> None:
            self.left -= 1
            if self.left == 0 or (for_good and self.left < 0):
                raise RuntimeError("device lost")
            put(pile, where, values)

        monkeypatch.setattr(Pile, "put", failing)


def test_a_commit_that_fails_half_way_is_undone(
    weights: HostWeights, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bits(ranks)
    ranks.stage("a", random_update(weights, 0))
    with monkeypatch.context() as patch:
        Failing(patch, 3, for_good=False)
        (answer,) = [ranks.ranks[0].commit("a")]
    assert (answer["ok"], answer["type"]) == (False, "EngineError")
    assert "device lost" in answer["error"]
    assert ranks.ranks[1].commit("a")["ok"]
    assert [a["undone"] for a in ranks.call("undo", "a")] == [False, True]
    assert unchanged(ranks, before)
    assert ranks.digest().version_digest() == DigestState.of(weights).version_digest()


def test_words_that_did_not_take_are_noticed(
    weights: HostWeights, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bits(ranks)
    ranks.stage("a", random_update(weights, 0))
    put, lost = Pile.put, []

    def forgetful(pile: Pile, where: Any, values: Any) -> None:
        if lost:
            put(pile, where, values)
        lost.append(pile)

    with monkeypatch.context() as patch:
        patch.setattr(Pile, "put", forgetful)
        answer = ranks.ranks[0].commit("a")
    assert answer["type"] == "EngineError"
    assert "read back" in answer["error"]
    assert unchanged(ranks, before)


def test_a_rank_that_cannot_restore_its_words_is_in_doubt(
    weights: HostWeights, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.stage("a", random_update(weights, 0))
    with monkeypatch.context() as patch:
        Failing(patch, 3, for_good=True)
        answer = ranks.ranks[0].commit("a")
    assert answer["type"] == "FatalReplicaError"
    again = ranks.ranks[0].stage_part("b", 0, random_update(weights, 1).to_bytes(ranks.schema))
    assert again["type"] == "FatalReplicaError"
    assert "device lost" in ranks.ranks[0].describe()["doubt"]
    with pytest.raises(FatalReplicaError, match="rank 0"):
        port.check([answer, {"ok": False, "type": "EngineError", "error": "x"}])


@pytest.mark.parametrize("window_bits", [3, 5, 18])
@pytest.mark.parametrize("limit", [0, 2000, 1 << 32])
def test_windows_write_the_same_words_as_single_writes(
    weights: HostWeights, monkeypatch: pytest.MonkeyPatch, window_bits: int, limit: int
) -> None:
    monkeypatch.setattr(pile_module, "WINDOW_BITS", window_bits)
    monkeypatch.setattr(pile_module, "WINDOW", 1 << window_bits)
    monkeypatch.setattr(pile_module, "PIECE", 7)
    layout = Layout(world=2, transposed=True)
    ranks = Ranks(layout, weights, dense_limit_bytes=limit)
    for step, share in enumerate((0.001, 0.02, 0.2, 0.6)):
        before = bits(ranks)
        update = random_update(weights, step, share)
        answers = ranks.stage(f"s{step}", update)
        assert all(a["ok"] for a in answers)
        if limit == 1 << 32 and share == 0.2:
            assert all(a["dense_bytes"] > 0 for a in answers)
        assert all(a["ok"] for a in ranks.call("commit", f"s{step}"))
        ranks.call("undo", f"s{step}")
        assert unchanged(ranks, before)
        ranks.stage(f"t{step}", update)
        ranks.call("commit", f"t{step}")
        update.apply(weights)
        for rank, model in enumerate(ranks.models):
            assert same_bits(live_bits(model), live_bits(built(layout, rank, pairs(weights))))


def both(weights: HostWeights, head_bit: int) -> UpdateSet:
    updates = []
    for name, bit in (("embed.weight", 1), ("lm_head.weight", head_bit)):
        old = weights.words(name)[4:9].copy()
        positions = np.arange(4, 9, dtype=np.int64)
        index = weights.schema.index[name]
        new = old ^ np.uint16(bit)
        updates.append(TensorUpdate(tensor=index, positions=positions, new=new, old=old))
    return UpdateSet(updates)


def test_a_tied_head_that_the_loader_ignores_stands_for_the_embedding() -> None:
    weights = checkpoint(TWO, head=True)
    ranks = Ranks(TWO, weights)
    assert ranks.agreement.settlement["twins"] == {"lm_head.weight": "embed.weight"}
    assert ranks.digest().version_digest() == DigestState.of(weights).version_digest()
    for wrong in (both(weights, 2), UpdateSet(both(weights, 1).updates[:1])):
        answers = ranks.stage("a", wrong)
        assert "tied" in answers[0]["error"]
        ranks.call("discard")
    assert all(a["ok"] for a in ranks.stage("b", both(weights, 1)))
    ranks.call("commit", "b")
    both(weights, 1).apply(weights)
    assert (ranks.digest().lanes == DigestState.of(weights).lanes).all()


def test_an_ignored_tensor_that_equals_no_other_is_refused() -> None:
    weights = checkpoint(TWO, head=True)
    weights.words("lm_head.weight")[7] ^= 1
    ranks = Ranks(TWO, weights)
    assert ranks.agreement.refused == {"lm_head.weight": "no rank's loader takes it"}
    with pytest.raises(EngineError, match="lm_head"):
        ranks.digest()
    with pytest.raises(EngineError, match="lm_head"):
        ranks.agreement.check_update(random_update(weights, 0, names=["lm_head.weight"]))
    ranks.digest(["norm.weight"])


def test_a_replica_of_a_tensor_that_differs_is_named(ranks: Ranks) -> None:
    ranks.models[1].norm.data[3] += 1
    with pytest.raises(EngineError, match=r"norm\.weight"):
        ranks.digest()
    ranks.digest(["embed.weight"])


def test_a_stale_copy_outside_the_parameters_is_named() -> None:
    layout = Layout(latent="copied")
    ranks = Ranks(layout, checkpoint(layout))
    ranks.models[0].w_kc.view(-1)[5] += 1
    with pytest.raises(EngineError, match="kv_b_proj"):
        ranks.digest()


def test_missing_ranks_and_missing_elements_are_noticed(weights: HostWeights) -> None:
    ranks = Ranks(TWO, weights)
    answers = ranks.call("learn")
    with pytest.raises(EngineError, match="rank 0 of 2"):
        Agreement.of(weights.schema, answers[:1])
    for answer in answers:
        answer["world"] = 1
    agreement = Agreement.of(weights.schema, answers[:1])
    assert "of its" in agreement.refused["embed.weight"]
    assert "norm.weight" not in agreement.refused
    size = weights.schema["q_proj.weight"].num_words
    answers[0]["names"]["q_proj.weight"] = [[0, [[size, 1]]], [8, [[size // 2, 1]]]]
    refused = Agreement.of(weights.schema, answers[:1]).refused
    assert "overlap" in refused["q_proj.weight"]


def test_digests_during_a_commit_are_not_mixed(
    weights: HostWeights, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = ranks.ranks[0]
    ranks.stage("a", random_update(weights, 0))
    calls: list[Any] = []

    def interrupted(*args: Any) -> Any:
        if len(calls) == 2:
            thread = threading.Thread(target=rank.commit, args=("a",))
            thread.start()
            thread.join()
        calls.append(args)
        return block_terms(*args)

    with monkeypatch.context() as patch:
        patch.setattr(lanes_module, "block_terms", interrupted)
        answer = rank.lanes()
    assert "ask again" in answer["error"]
    with pytest.raises(EngineError, match="ask again"):
        ranks.digest()
    ranks.ranks[1].commit("a")
    assert ranks.digest()


def test_calls_run_in_a_thread_by_ticket(weights: HostWeights, ranks: Ranks) -> None:
    update = random_update(weights, 0)
    data = update.to_bytes(ranks.schema)
    for rank in ranks.ranks:
        assert rank.begin("t1", "stage_part", ("a", 0, data))["ok"]
        assert rank.begin("t1", "stage_part", ("a", 0, data))["ok"]
        assert rank.finish("t1", 10.0) == {"ok": True}
        assert rank.begin("t2", "seal", ("a", 1, update.num_changed))["ok"]
        assert "num_local" in rank.finish("t2", 10.0)
        assert rank.begin("t3", "commit", ("a",))["type"] == "UsageError"
        assert rank.finish("t9")["type"] == "UsageError"
        rank._lock.acquire()
        try:
            assert rank.begin("t4", "lanes", ())["ok"]
            assert rank.finish("t4", 0.01) == {"ok": True, "running": True}
            assert rank.begin("t5", "lanes", ())["type"] == "UsageError"
        finally:
            rank._lock.release()
        assert "terms" in rank.finish("t4", 10.0)


def test_answers_are_json_and_never_raise(ranks: Ranks) -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("describe", ()),
        ("learn", ()),
        ("lanes", (["norm.weight"],)),
        ("lanes", (["none"],)),
        ("settle", ({},)),
        ("stage_part", ("a", 0, b"")),
        ("seal", ("a", 1, 1)),
        ("commit", ("a",)),
        ("undo", ("a",)),
        ("discard", ()),
        ("forget", ()),
    ]
    for method, args in calls:
        for answer in ranks.call(method, *args):
            assert json.loads(json.dumps(answer)) == answer
            assert answer["ok"] in (True, False)
            assert port.error_of(answer) is None or not answer["ok"]
