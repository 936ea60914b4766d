"""Replicas of one host that share what they fetch."""

from __future__ import annotations

from pathlib import Path

from replica_kit import replica_of

from stitch.testing.published import digest_of, published_run


async def test_a_second_replica_of_the_host_needs_no_blob_from_the_board(tmp_path: Path) -> None:
    world = published_run(tmp_path, 5)
    cache = tmp_path / "cache"
    async with replica_of(world, cache=cache) as first:
        await first.serves(5)
    for version in range(1, 6):
        world.blob_path(version).unlink()
    async with replica_of(world, cache=cache) as second:
        await second.serves(5)
        assert digest_of(second.engine.weights) == world.digests[5]
        status, proof = await second.post("/verify")
        assert (status, proof["equal"]) == (200, True)
    assert len(list(cache.glob("*.blob"))) == 5
