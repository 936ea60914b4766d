"""Removing what retention found to be garbage, in two phases: mark, wait, sweep.

Nothing is deleted before a mark that names it has been on the board for the grace time, by the
store's clock, and before it is found to be garbage once more. Until then readers that planned their
way earlier finish; new ones are told by `retention.json` and go another way. Killed anywhere, it
leaves marks, which the next one works off; two at once do the same work twice.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stitch.board import keys
from stitch.board.keeping.inventory import Inventory
from stitch.board.keeping.retention import RetentionPlan, RetentionPolicy, plan_retention
from stitch.board.keeping.retired import MAX_MARK_BYTES, Mark
from stitch.board.stores.probe import probe_key
from stitch.board.stores.store import ObjectInfo
from stitch.errors import CorruptRecordError, StoreError, UnsupportedFormatError
from stitch.failpoints import reach

if TYPE_CHECKING:
    from stitch.board.log import Run

log = logging.getLogger("stitch.board")

DEFAULT_GRACE_S = 3600.0
MAX_MARKED = 200_000
"""Keys in one mark, so that it stays below its readers' bound."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What one round did. Sizes in bytes."""

    plan: RetentionPlan
    num_marked: int = 0
    num_waiting: int = 0
    """Garbage whose grace time is not over."""
    num_deleted: int = 0
    deleted_bytes: int = 0
    num_failed: int = 0
    """Deletions that the store refused; the next round tries them again."""


class Collector:
    """Applies a policy to a run."""

    def __init__(
        self, run: Run, policy: RetentionPolicy, *, grace_s: float = DEFAULT_GRACE_S
    ) -> None:
        """`grace_s`: the longest that a reader may need for a route that it has planned."""
        self._run = run
        self._policy = policy
        self._grace_s = grace_s
        self._writer = f"g{secrets.token_hex(8)}"

    def look(self) -> RetentionPlan:
        """What is garbage now. Writes nothing.

        Without writing, the store's time is only known to be that of the latest object or later, so
        where nobody writes, ages come out too low and more is kept.
        """
        return plan_retention(self._run, self._policy, Inventory.of(self._run))

    def collect(self) -> Collected:
        """One round: announce and mark new garbage, delete what was marked long enough ago."""
        inventory = Inventory.of(self._run)
        self._read_clock(inventory)
        marks = dict(self._marks(inventory))
        marked = frozenset(key for mark in marks.values() for key in mark.keys)
        plan = plan_retention(self._run, self._policy, inventory, marked=marked)
        new = sorted(plan.garbage.keys() - marked)
        if plan.garbage:
            self._announce(plan)
        reach("gc.announced")
        for start in range(0, len(new), MAX_MARKED):
            info, mark = self._put_mark(tuple(new[start : start + MAX_MARKED]))
            inventory.saw(info)
            marks[info] = mark
        reach("gc.marked")
        ripe = {i: m for i, m in marks.items() if inventory.age_s(i) >= self._grace_s}
        return self._sweep(plan, ripe, num_marked=len(new))

    def _read_clock(self, inventory: Inventory) -> None:
        """Learn the store's time from an object written now."""
        store = self._run.board.store
        with probe_key(store) as key:
            store.put(key, b"", mode="create")
            info = store.head(key)
        if info is not None:
            inventory.saw(info)

    def _marks(self, inventory: Inventory) -> Iterable[tuple[ObjectInfo, Mark]]:
        for info in inventory.marks:
            try:
                data = self._run.board.store.get(info.key, max_bytes=MAX_MARK_BYTES)
                if data is not None:
                    yield info, Mark.parse(data, info.key)
            except (CorruptRecordError, UnsupportedFormatError) as error:
                log.warning("event=mark_ignored error=%s", error)

    def _announce(self, plan: RetentionPlan) -> None:
        """Tell readers which patches to do without; only if it is news."""
        record = plan.record(self._run.name, self._writer, time.time())
        before = self._run.retention()
        if before is not None and (before.first, before.kept) == (record.first, record.kept):
            return
        key = keys.retention(self._run.name)
        self._run.board.store.put(key, record.to_json_bytes(), mode="overwrite")

    def _put_mark(self, garbage: tuple[str, ...]) -> tuple[ObjectInfo, Mark]:
        mark = Mark(
            run=self._run.name, keys=garbage, created_unix_s=time.time(), writer=self._writer
        )
        key = keys.mark(self._run.name, f"{self._writer}-{secrets.token_hex(4)}")
        store = self._run.board.store
        store.put(key, mark.to_json_bytes(), mode="create")
        info = store.head(key)
        if info is None:
            raise StoreError(f"{key} was written, but the store does not show it")
        return info, mark

    def _sweep(
        self, plan: RetentionPlan, ripe: dict[ObjectInfo, Mark], *, num_marked: int
    ) -> Collected:
        """Delete what ripe marks name and is still garbage; then the marks."""
        doomed = {
            key: plan.garbage[key]
            for info, mark in ripe.items()
            for key in mark.keys
            if key in plan.garbage and _is_older(plan.garbage[key], info)
        }
        failed: set[str] = set()
        # Records first: what still names its blobs must not be there without them.
        for key in sorted(doomed, key=lambda key: (not key.endswith(".json"), key)):
            reach("gc.deleting")
            if not self._delete(f"{self._run.name}/{key}"):
                failed.add(key)
        if any(key.endswith("/anchor.json") for key in doomed):
            self._run.hint_at_anchors()
        reach("gc.swept")
        for info, mark in ripe.items():
            if not failed.intersection(mark.keys):
                self._delete(info.key)
        deleted = [doomed[key] for key in doomed if key not in failed]
        return Collected(
            plan=plan,
            num_marked=num_marked,
            num_waiting=len(plan.garbage) - len(doomed),
            num_deleted=len(deleted),
            deleted_bytes=sum(info.num_bytes for info in deleted),
            num_failed=len(failed),
        )

    def _delete(self, key: str) -> bool:
        try:
            self._run.board.store.delete(key)
            return True
        except StoreError as error:  # a file that somebody holds open, for instance
            log.warning("event=not_deleted key=%s error=%s", key, error)
            return False


def _is_older(info: ObjectInfo, mark: ObjectInfo) -> bool:
    """Whether an object was there, by the store's clock, when it was marked."""
    if info.modified_unix_s is None or mark.modified_unix_s is None:
        return False
    return info.modified_unix_s <= mark.modified_unix_s
