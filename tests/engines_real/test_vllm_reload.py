"""A stock vLLM, without our plugin."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from equality import advance, at
from real_kit import QUIET, RealVllm, digest_of
from real_models import make_model, save
from reload_suite import OnStockEngine, ServedByReloads, answers, reloading, started

from stitch.errors import FatalReplicaError
from stitch.testing.tiny import tiny_checkpoint


class TestUntiedOnOneRank(OnStockEngine):
    engine, kind, tp = RealVllm, "untied", 1


class TestUntiedOnTwoRanks(OnStockEngine):
    engine, kind, tp = RealVllm, "untied", 2
    goes_back = False


class TestServed(ServedByReloads):
    engine = RealVllm


HAS_A_COPY = """
import sys, torch
import vllm.platforms
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
head = torch.nn.Linear(128, 1024, bias=False, dtype=getattr(torch, sys.argv[1]))
dispatch_cpu_unquantized_gemm(head, remove_weight=False)
head.weight.data.zero_()
found = head.cpu_linear(torch.ones(4, 128, dtype=head.weight.dtype), head.weight, None)
print("a copy" if found.any() else "the parameter")
"""


def computes_with_a_copy(dtype: str) -> bool:
    """Whether vLLM packs the weights of an output head on this processor."""
    said = subprocess.check_output(
        [RealVllm.python(), "-c", HAS_A_COPY, dtype], text=True, env={**os.environ, **QUIET}
    )
    return {"a copy": True, "the parameter": False}[said.splitlines()[-1]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_a_tied_head_that_reloads_do_not_reach_is_found_at_start(
    dtype: str, tmp_path: Path
) -> None:
    """vLLM computes with packed copies of linear weights where its kernels want them: in float32 on
    most processors, in bfloat16 on some. A reload packs them anew, but not that of a tied head."""
    model = model_of(dtype, tied=True, directory=tmp_path / "model")
    if computes_with_a_copy(dtype):
        with pytest.raises(FatalReplicaError, match="computes with old ones"):
            async with reloading(RealVllm, model, tmp_path / "live", **SETTINGS[dtype]):
                pass
    else:
        await goes_and_comes_back(model, tmp_path / "live", dtype)


async def test_packed_weights_are_packed_anew_by_a_reload(tmp_path: Path) -> None:
    model = model_of("float32", tied=False, directory=tmp_path / "model")
    await goes_and_comes_back(model, tmp_path / "live", "float32")


SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"view": "checkpoint", "args": ("--dtype", "float32")},
}


def model_of(dtype: str, *, tied: bool, directory: Path) -> Path:
    stored = {"bfloat16": "BF16", "float32": "F32"}[dtype]
    return tiny_checkpoint(directory, hidden=128, vocab=1003, tied=tied, seed=5, dtype=stored)


async def goes_and_comes_back(model: Path, place: Path, dtype: str) -> None:
    async with reloading(RealVllm, model, place, **SETTINGS[dtype]) as it:
        await it.engine.bind(at(0), digest_of(it.weights))
        before = await answers(it.url)
        await advance(it.engine, it.weights, 1)
        after = await answers(it.url)
        assert after != before
        checkpoint = save(it.weights, model, place / "v1")
        await it.engine.roll_back(at(0))
        assert await answers(it.url) == before
        await it.engine.close()
    async with started(RealVllm, checkpoint, place / "log-1", **SETTINGS[dtype]) as url:
        assert await answers(url) == after


async def test_experts_that_do_not_load_twice_are_found_at_start(tmp_path: Path) -> None:
    """On CPUs vLLM lays them out anew after the first load."""
    model = make_model("moe", tmp_path / "model")
    with pytest.raises(FatalReplicaError, match="reload"):
        async with reloading(RealVllm, model, tmp_path / "live"):
            pass
