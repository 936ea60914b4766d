"""Anchors beside publishing: when one is due, and writing it while the trainer goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from stitch.board import AnchorStep, Run, plan_route
from stitch.errors import NoRouteError, StitchError
from stitch.mirror import Mirror
from stitch.publish.anchor import write_anchor
from stitch.tensors import HostWeights

log = logging.getLogger(__name__)

AnchorEvery = int | Literal["auto"] | None

_RETRY_SHARE = 0.1
"""After a failure as large a share of the view is published in patches before the next try."""


class AnchorRule:
    """Says after which versions an anchor is due; one that fails is made up for later."""

    def __init__(self, run: Run, every: AnchorEvery) -> None:
        """`every`: each n-th version; "auto": when what follows the last anchor, or the base, costs
        a reader more bytes than the whole; None: never."""
        self._run = run
        self._every = every
        self._is_due = False
        self._patched_bytes: int | None = None

    def is_due(self, version: int, num_bytes: int) -> bool:
        """Whether to write an anchor of `version`, whose patch takes `num_bytes`."""
        if self._every == "auto":
            return self._costs_more_than_the_whole(version, num_bytes)
        self._is_due = self._every is not None and (self._is_due or version % self._every == 0)
        return self._is_due

    def written(self, failed: bool) -> None:
        """An anchor that was due was written, or not."""
        self._is_due = failed
        almost = int((1 - _RETRY_SHARE) * self._run.record.num_bytes)
        self._patched_bytes = almost if failed else None

    def _costs_more_than_the_whole(self, version: int, num_bytes: int) -> bool:
        """The bytes are added up; only where they reach the view's is the board asked."""
        whole_bytes = self._run.record.num_bytes
        if self._patched_bytes is not None:
            self._patched_bytes += num_bytes
        if self._patched_bytes is None or self._patched_bytes > whole_bytes:
            self._patched_bytes = self._bytes_to(version)
        return self._patched_bytes > whole_bytes

    def _bytes_to(self, version: int) -> int:
        """What a reader fetches that has the base, or the anchor that it needs."""
        try:
            steps = plan_route(self._run, 0, version).steps
        except NoRouteError:  # only an anchor helps
            return self._run.record.num_bytes + 1
        return sum(step.num_bytes for step in steps if not isinstance(step, AnchorStep))


class AnchorWriter:
    """Writes anchors of published versions in a thread of its own, one at a time.

    It reads the weights where they are, so whoever wants to overwrite them asks `surrender` first.
    """

    def __init__(
        self,
        run: Run,
        rule: AnchorRule,
        *,
        scratch: Path | None,
        writer: str,
        give_back: Callable[[HostWeights], None],
    ) -> None:
        """`give_back` gets the weights that were not surrendered, once they may be overwritten."""
        self._run = run
        self._rule = rule
        self._scratch = scratch
        self._writer = writer
        self._give_back = give_back
        self._changed = threading.Condition()
        self._held: HostWeights | None = None
        self._is_owed = False

    def after(self, baseline: Mirror, num_bytes: int) -> None:
        """Called after each version with its weights and its patch's bytes.

        Never raises and hardly waits; what fails is logged.
        """
        assert baseline.ref is not None
        try:
            if not self._rule.is_due(baseline.ref.version, num_bytes):
                return
        except StitchError as error:
            log.warning("event=anchor_rule_failed version=%s error=%s", baseline.ref, error)
            return
        with self._changed:
            if self._held is not None:
                return  # still busy with an earlier one; this one is left out
            self._held = baseline.weights
        thread = threading.Thread(
            target=self._write, args=(baseline,), name="stitch-anchor", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter exits and starts no more threads
            self._write(baseline)

    def _write(self, baseline: Mirror) -> None:
        assert baseline.ref is not None
        failed = True
        try:
            write_anchor(
                self._run,
                baseline.weights,
                baseline.ref.version,
                scratch=self._scratch,
                writer=self._writer,
            )
            failed = False
            log.info("event=anchored version=%s", baseline.ref)
        except Exception as error:  # a background convenience must not fail a published version
            log.warning("event=anchor_failed version=%s error=%s", baseline.ref, error)
        finally:
            self._rule.written(failed)
            with self._changed:
                weights, self._held = self._held, None
                is_owed, self._is_owed = self._is_owed, False
                self._changed.notify_all()
            if is_owed and weights is not None:
                self._give_back(weights)

    def surrender(self, weights: HostWeights) -> bool:
        """Whether `weights` may be overwritten now. If not, `give_back` gets them later."""
        with self._changed:
            if self._held is not weights:
                return True
            self._is_owed = True
            return False

    def wait_idle(self, timeout_s: float | None = None) -> None:
        """Return once no anchor is being written; TimeoutError after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._held is None, timeout_s):
                raise TimeoutError(
                    f"after {timeout_s:.3g} s an anchor of run {self._run.name!r} is not written"
                )
