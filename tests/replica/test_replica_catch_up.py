"""A replica far behind goes over merged patches: one commit, one pause, whatever is missing."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from replica_kit import DEADLINE_S, engine_at, replica_of, served, until
from test_replica_kill import holds_what_its_label_says, serving

from stitch.publish.compact import Compactor
from stitch.testing.published import PublishedRun, digest_of, published_run

NEWEST = 18


@pytest.fixture
def compacted(tmp_path: Path) -> PublishedRun:
    """A run of 18 versions and its merged patches."""
    world = published_run(tmp_path, NEWEST)
    Compactor(world.run, threads=1).compact()
    return world


def remove(world: PublishedRun, version: int, start: int | None = None) -> None:
    """Delete the patch of a version, or a merged patch, without its record."""
    pattern = "w*.patch" if start is None else f"from-{start:08d}-*.patch"
    paths = list(world.folder(version).glob(pattern))
    assert paths
    for path in paths:
        path.unlink()


async def test_many_versions_are_one_commit_over_merged_patches(compacted: PublishedRun) -> None:
    for version in range(1, 17):
        remove(compacted, version)  # only the merged ones lead on
    async with replica_of(compacted) as replica:
        await replica.serves(NEWEST)
        assert digest_of(replica.engine.weights) == compacted.digests[NEWEST]
        (commit,) = replica.app.status.commits
        assert (commit.from_version, commit.version) == (0, NEWEST)
        merged = compacted.run.merged(0, 16)
        assert merged is not None
        singles = sum(compacted.run.manifest(v).num_bytes for v in (17, 18))
        assert commit.bytes_fetched == merged.num_bytes + singles
        status, proof = await replica.post("/verify")
        assert (status, proof["equal"]) == (200, True)


async def test_missing_merged_patches_are_gone_around(compacted: PublishedRun) -> None:
    remove(compacted, 16, 0)
    (compacted.folder(12) / "from-00000008.json").write_bytes(b"\0" * 50)
    async with replica_of(compacted) as replica:
        await replica.serves(NEWEST)
        assert digest_of(replica.engine.weights) == compacted.digests[NEWEST]
        assert [commit.from_version for commit in replica.app.status.commits] == [0]
        assert replica.app.status.blocked == ""


async def test_a_merged_patch_leads_over_a_version_that_is_gone(compacted: PublishedRun) -> None:
    remove(compacted, 6)
    remove(compacted, 16, 0)
    remove(compacted, 8, 0)
    async with replica_of(compacted) as replica:
        await replica.serves(NEWEST)
        assert [commit.from_version for commit in replica.app.status.commits] == [0]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("failpoint", "served_after"),
    [("replica.fetched", 0), ("replica.decoded:2", 0), ("replica.committed", NEWEST)],
)
async def test_a_replica_killed_while_it_catches_up_is_old_or_new(
    compacted: PublishedRun, failpoint: str, served_after: int
) -> None:
    engine = engine_at(compacted, 0)
    async with served(engine) as url:
        async with serving(compacted, url, failpoint) as process, asyncio.timeout(DEADLINE_S):
            assert await process.wait() == -signal.SIGKILL
        assert holds_what_its_label_says(engine, compacted) == served_after
        remove(compacted, 16, 0)
        async with serving(compacted, url):
            await until(lambda: engine.ref is not None and engine.ref.version == NEWEST)
            assert holds_what_its_label_says(engine, compacted) == NEWEST
