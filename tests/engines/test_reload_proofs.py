"""What checksums and answers prove of a stock engine; and the process that keeps it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from reload_kit import ToyEngine, load, small_model

from stitch.engines.group.ending import descendants
from stitch.engines.reload.answers import NUM_TOKENS, Step, checked, disagreement, exchanged
from stitch.engines.reload.checksums import EMPTY, Knowledge
from stitch.engines.reload.launch import stock_command, stock_environment
from stitch.engines.reload.recipes import Guesses, Parameter, digest_of, kv_heads_of
from stitch.engines.reload.selftest import token_tensors
from stitch.engines.reload.stock import StockRefusedError
from stitch.errors import UsageError
from stitch.tensors import HostWeights
from stitch.types import Schema, TensorSpec


def weights_of(**shapes: tuple[int, ...]) -> HostWeights:
    """Random BF16 tensors; `__` stands for a dot."""
    schema = Schema.of(
        TensorSpec.of(name.replace("__", "."), "BF16", shape) for name, shape in shapes.items()
    )
    weights = HostWeights.allocate(schema)
    rng = np.random.default_rng(0)
    for index, spec in enumerate(schema.tensors):
        weights.words_at(index)[:] = rng.integers(0, 60000, spec.num_words)
    return weights


def matrix(weights: HostWeights, name: str) -> np.ndarray:
    return weights.words(name).reshape(weights.schema[name].shape)


def sha(*parts: np.ndarray) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in parts)).hexdigest()


def explained(weights: HostWeights, parameter: Parameter, reported: str, **kwargs: int) -> bool:
    knowledge = Knowledge.learned({parameter: reported}, weights, Guesses(weights.schema, **kwargs))
    if not knowledge.recipes:
        return False
    assert digest_of(knowledge.recipes[parameter], weights) == reported
    return True


def test_a_parameter_is_explained_by_the_tensor_of_its_name() -> None:
    weights = weights_of(model__norm__weight=(8,), scale=())
    for name in ("model.norm.weight", "norm.weight", "scale"):
        held = weights.words("scale" if name == "scale" else "model.norm.weight")
        assert explained(weights, Parameter(name=name, rank=0, ranks=1), sha(held))


def test_fused_projections_are_explained_on_each_rank() -> None:
    weights = weights_of(
        a__q_proj__weight=(8, 4), a__k_proj__weight=(2, 4), a__v_proj__weight=(2, 4)
    )
    q, k, v = (matrix(weights, f"a.{part}_proj.weight") for part in "qkv")
    fused = Parameter(name="a.qkv_proj.weight", rank=1, ranks=2)
    assert explained(weights, fused, sha(q[4:], k[1:], v[1:]))
    # Fewer heads of keys and values than ranks: some ranks have the same.
    third = Parameter(name="a.qkv_proj.weight", rank=2, ranks=4)
    assert explained(weights, third, sha(q[4:6], k[1:], v[1:]), kv_heads=2)


def test_shards_by_column_and_padded_vocabularies_are_explained() -> None:
    weights = weights_of(a__o_proj__weight=(4, 6), embed__weight=(70, 2))
    o, rows = matrix(weights, "a.o_proj.weight"), matrix(weights, "embed.weight")
    column = Parameter(name="a.o_proj.weight", rank=1, ranks=2)
    assert explained(weights, column, sha(o[:, 3:]))
    padded = np.pad(rows, ((0, 128 - 70), (0, 0)))
    one = Parameter(name="embed.weight", rank=0, ranks=1)
    assert explained(weights, one, sha(padded))
    second = Parameter(name="embed.weight", rank=1, ranks=2)
    assert explained(weights, second, sha(padded[64:]))


def test_stacked_experts_are_explained() -> None:
    names = {
        f"m__experts__{e}__{kind}_proj__weight": (2, 6) if kind == "down" else (6, 2)
        for e in range(3)
        for kind in ("gate", "up", "down")
    }
    weights = weights_of(**names)
    parts = [
        matrix(weights, f"m.experts.{e}.{kind}_proj.weight")[3:]
        for e in range(3)
        for kind in ("gate", "up")
    ]
    wide = Parameter(name="m.experts.w13_weight", rank=1, ranks=2)
    assert explained(weights, wide, sha(*parts))
    narrow = Parameter(name="m.experts.w2_weight", rank=1, ranks=2)
    down = [matrix(weights, f"m.experts.{e}.down_proj.weight")[:, 3:] for e in range(3)]
    assert explained(weights, narrow, sha(*down))


def test_packed_and_empty_tensors_are_not_explained() -> None:
    packed, empty = TensorSpec.of("a", "F4", (4, 6)), TensorSpec.of("b", "BF16", (0, 2))
    weights = HostWeights.allocate(Schema.of([packed, empty]))
    for name in ("a", "b"):
        assert not explained(weights, Parameter(name=name, rank=0, ranks=1), "f" * 64)


def test_what_nothing_explains_is_followed_or_dark() -> None:
    weights = weights_of(a__weight=(4,), b__weight=(4,))
    known = Parameter(name="a.weight", rank=0, ranks=1)
    empty = Parameter(name="b.weight", rank=0, ranks=1)
    alien = Parameter(name="rope.table", rank=0, ranks=1)
    reported = {known: "f" * 64, empty: EMPTY[:16], alien: "e" * 64}
    knowledge = Knowledge.learned(reported, weights, Guesses(weights.schema))
    assert knowledge.followed == {known: ("a.weight",)}
    assert knowledge.dark == {empty, alien}
    assert not knowledge.explains_all

    def faults(found: dict[Parameter, str], *changed: str) -> list[str]:
        return list(
            knowledge.faults(
                {**reported, **found}, expected={}, before=reported, changed=frozenset(changed)
            )
        )

    assert faults({}) == []
    assert faults({known: "d" * 64}, "a.weight") == []
    assert "did not change" in faults({}, "a.weight")[0]
    assert "changed" in faults({known: "d" * 64})[0]
    lost = {known: "f" * 64}
    came_or_went = knowledge.faults(lost, expected={}, before=reported, changed=frozenset())
    assert list(came_or_went) == ["2 parameters came or went"]


def test_a_toy_engine_on_two_ranks_is_explained_whole(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    toy = ToyEngine(model, ranks=2)
    reported = {Parameter(name=n, rank=r, ranks=2): v for r, n, v in toy.checksums()}
    guesses = Guesses(load(model).schema, kv_heads=kv_heads_of(model))
    assert Knowledge.learned(reported, load(model), guesses).explains_all


def test_heads_of_keys_and_values_come_from_the_configuration(tmp_path: Path) -> None:
    assert kv_heads_of(tmp_path) is None
    config = tmp_path / "config.json"
    for content, wanted in (
        ({"num_key_value_heads": 4}, 4),
        ({"text_config": {"num_key_value_heads": 2}}, 2),
        ({"num_key_value_heads": "x"}, None),
        ([1], None),
    ):
        config.write_text(json.dumps(content))
        assert kv_heads_of(tmp_path) == wanted


def steps(*tokens: int, logprob: float = -0.5, lead: float = 2.0) -> tuple[Step, ...]:
    return tuple(Step(token=token, logprob=logprob, lead=lead) for token in tokens)


def test_answers_agree_but_for_ties_and_small_differences() -> None:
    wanted = [steps(1, 2, 3)]
    assert disagreement(wanted, [steps(1, 2, 3, logprob=-0.53)]) is None
    assert "log probability" in str(disagreement(wanted, [steps(1, 2, 3, logprob=-0.9)]))
    assert "token 1: 9 instead of 2" in str(disagreement(wanted, [steps(1, 9, 3)]))
    tie = [(*steps(1), *steps(2, lead=0.01), *steps(3))]
    other = [(*steps(1), *steps(9, lead=0.02), *steps(8))]
    assert disagreement(tie, other) is None
    assert disagreement(tie, [steps(1, 9, 3)]) is not None  # a lead is no tie


def test_tokens_that_change_roles_change_them_in_answers() -> None:
    assert exchanged([steps(1, 2, 7)], 2, 5) == (steps(1, 5, 7),)


@pytest.mark.parametrize(
    "answers", [[], [steps(1)], [steps(*range(NUM_TOKENS), logprob=float("nan"))]]
)
def test_answers_that_are_not_whole_or_not_finite_are_refused(
    answers: list[tuple[Step, ...]],
) -> None:
    with pytest.raises(StockRefusedError):
        checked(answers, 1)


def test_the_tensors_of_tokens_are_found_by_name_and_shape() -> None:
    weights = weights_of(model__embed_tokens__weight=(9, 4), lm_head__weight=(9, 4))
    assert token_tensors(weights.schema) == ["model.embed_tokens.weight", "lm_head.weight"]
    other = weights_of(model__embed_tokens__weight=(9, 4), draft__embed_tokens__weight=(9, 4))
    assert token_tensors(other.schema) == []
    assert token_tensors(weights_of(wpe__weight=(3, 3)).schema) == []


@pytest.mark.parametrize(("engine", "module"), [("vllm", "serve"), ("sglang", "--model-path")])
def test_a_stock_engine_is_bound_to_loopback(engine: str, module: str) -> None:
    command = stock_command(
        engine, Path("/d"), port=7, served_model_name="m", python="/e/python", args=["--x", "1"]
    )
    assert command[command.index(module) + 1] == "/d"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[-4:] == ["--dtype", "bfloat16", "--x", "1"]
    assert ("VLLM_SERVER_DEV_MODE" in stock_environment(engine)) == (engine == "vllm")
    with pytest.raises(UsageError, match="--host"):
        stock_command(engine, Path("/d"), port=7, served_model_name="m", args=["--host=0.0.0.0"])


TREE = """
import subprocess, sys, time
kind = sys.argv[1]
if kind == "engine":
    subprocess.Popen([sys.executable, "-c", sys.argv[2], "orphan-maker", sys.argv[2]]).wait()
    print("up", flush=True)
    time.sleep(300 if len(sys.argv) < 4 else 0)
elif kind == "orphan-maker":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
"""


def kept(*more: str) -> subprocess.Popen[str]:
    """A keeper whose engine has an orphan in another session."""
    keeper = [sys.executable, "-m", "stitch.engines.reload.keeper", str(os.getpid()), "--"]
    engine = [sys.executable, "-c", TREE, "engine", TREE, *more]
    return subprocess.Popen([*keeper, *engine], stdout=subprocess.PIPE, text=True)


def gone(pids: list[int]) -> bool:
    deadline_s = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def test_what_an_engine_leaves_ends_with_it() -> None:
    with kept("at once") as keeper:
        assert keeper.wait(60) == 0
        assert descendants(keeper.pid) == []


def test_a_signal_ends_the_engine_and_what_it_left() -> None:
    with kept() as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "up\n"
        below = descendants(keeper.pid)
        assert len(below) == 2
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(60) == 128 + signal.SIGTERM
        assert gone(below)


def test_the_parents_end_is_the_engines() -> None:
    inner = [sys.executable, "-m", "stitch.engines.reload.keeper"]
    script = (
        "import os, subprocess, sys, time\n"
        f"command = {inner!r} + [str(os.getpid()), '--', sys.executable, '-c', *sys.argv[1:]]\n"
        "subprocess.Popen(command)\n"
        "time.sleep(300)\n"
    )
    command = [sys.executable, "-c", script, TREE, "engine", TREE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        below = descendants(parent.pid)
        assert len(below) == 3
        parent.kill()
        parent.wait()
        assert gone(below)
