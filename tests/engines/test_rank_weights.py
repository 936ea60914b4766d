"""Ranks of small models: learned, changed in place, undone, digested."""

from __future__ import annotations

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

from stitch.codec import DigestState

LAYOUTS = {
    "tied": Layout(),
    "untied": Layout(tied=False),
    "two ranks": Layout(world=2),
    "two ranks, untied": Layout(world=2, tied=False),
    "kv heads on several ranks": Layout(world=4),
    "experts": Layout(experts=True, world=2),
    "repacked experts": Layout(experts=True, repack=True),
    "repacked experts, two ranks": Layout(experts=True, repack=True, world=2),
    "transposed": Layout(transposed=True, world=2),
    "threads": Layout(threads=True, experts=True),
    "joined before the copy": Layout(joined=True, world=2),
    "derived copies": Layout(latent="copied", world=2),
    "wide norms": Layout(wide_norms=True, world=2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_patches_equal_a_fresh_load_and_undo_gives_every_bit_back(layout: Layout) -> None:
    weights = checkpoint(layout)
    ranks = Ranks(layout, weights)
    assert ranks.agreement.refused == {}
    assert ranks.digest().version_digest() == DigestState.of(weights).version_digest()
    for step in range(6):
        before = [live_bits(model) for model in ranks.models]
        update = random_update(weights, step)
        assert all(a["ok"] for a in ranks.stage(f"s{step}", update)), ranks.stage("x", update)
        assert all(same_bits(b, live_bits(m)) for b, m in zip(before, ranks.models, strict=True))
        assert all(a["ok"] for a in ranks.call("commit", f"s{step}"))
        assert all(a["undone"] for a in ranks.call("undo", f"s{step}"))
        assert all(same_bits(b, live_bits(m)) for b, m in zip(before, ranks.models, strict=True))
        ranks.stage(f"t{step}", update)
        ranks.call("commit", f"t{step}")
        update.apply(weights)
        for rank, model in enumerate(ranks.models):
            fresh = built(layout, rank, pairs(weights))
            assert same_bits(live_bits(model), live_bits(fresh))
        assert (ranks.digest().lanes == DigestState.of(weights).lanes).all()
