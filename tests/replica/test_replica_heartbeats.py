"""Heartbeats at the end of a replica's life, and two replicas under one name."""

from __future__ import annotations

import asyncio
import threading

import pytest
from replica_kit import replica_of, until

from stitch.records import Heartbeat
from stitch.testing.published import PublishedRun


async def test_a_beat_on_its_way_does_not_outlive_a_clean_stop(
    published: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica_of(published) as replica:
        await replica.serves(3)
        run = replica.app._run
        assert run is not None
        put = run.put_heartbeat
        slow, go_on, landed = threading.Event(), threading.Event(), threading.Event()

        def slow_put(beat: Heartbeat) -> None:
            slow.set()
            assert go_on.wait(30)
            put(beat)
            landed.set()

        monkeypatch.setattr(run, "put_heartbeat", slow_put)
        await until(slow.is_set, "a beat on its way")
        remove = replica.app._heartbeats and replica.app._heartbeats.remove

        async def remove_and_let_go() -> None:
            assert remove is not None
            removing = asyncio.create_task(remove())
            # It must wait for the beat. One that does not has ended by then, and the beat stays.
            await asyncio.wait({removing}, timeout=0.5)
            go_on.set()
            await removing

        monkeypatch.setattr(replica.app._heartbeats, "remove", remove_and_let_go)
        replica.stop.set()
        await replica.ended
        await until(landed.is_set, "the beat on the board")
        assert published.run.heartbeats() == []


async def test_a_replica_leaves_the_heartbeat_of_another_under_its_name(
    published: PublishedRun,
) -> None:
    def boots() -> list[str]:
        return [beat.boot for beat in published.run.heartbeats()]

    def has_told_all() -> bool:
        return any(beat.applied == 3 and beat.ready for beat in published.run.heartbeats())

    async with replica_of(published, heartbeat_interval_s=600.0) as first:
        await first.serves(3)
        await until(has_told_all, "the first's last heartbeat before its long pause")
        async with replica_of(published) as second:
            await until(lambda: boots() == [second.app.status.boot], "the second's heartbeat")
            first.stop.set()
            await first.ended
            assert boots() == [second.app.status.boot]
    assert boots() == []
