"""Where mirrors of any version start: the run's base, or an anchor that is kept at hand."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

from stitch.board import AnchorStep, Run, plan_route
from stitch.errors import CorruptBlobError, NoRouteError, StoreError, UsageError
from stitch.mirror import Mirror, from_anchor_on_line, lead, recognise, root_base
from stitch.publish.base import resolve_base
from stitch.records import AnchorRecord
from stitch.tensors import open_checkpoint
from stitch.views import ViewReader

log = logging.getLogger(__name__)


class Origin:
    """Makes mirrors at the base or at an anchor. The last anchor fetched stays in `scratch`."""

    def __init__(
        self, run: Run, base: Path | None, scratch: Path | None, threads: int | None
    ) -> None:
        """`base`: a checkpoint; None: where the run record says it is."""
        self._run = run
        self._base = base
        self._is_base_usable = True
        self._scratch = scratch
        self._threads = threads
        self._kept: tuple[int, Path] | None = None

    def close(self) -> None:
        """Delete the anchor that was kept."""
        if self._kept is not None:
            shutil.rmtree(self._kept[1].parent, ignore_errors=True)
            self._kept = None

    def mirror(self, version: int) -> Mirror:
        """A mirror at some version from which `version` can be reached.

        Raises NoRouteError if the base is not at hand and no intact anchor leads there, of the run
        or of what it was forked from; AdvanceError if the fork cannot be reached.
        """
        mirror = self._from_base() or self._from_anchor(version)
        if mirror.ref is not None and mirror.ref.run != self._run.name:
            lead(mirror, self._run, 0, scratch=self._scratch, threads=self._threads)
        return mirror

    def _from_base(self) -> Mirror | None:
        if not self._is_base_usable:
            return None
        base = root_base(self._run) if self._base is None else self._base
        try:
            return self._load(resolve_base(base), self._run.record.view, ())
        except UsageError as error:
            log.warning("event=base_not_usable run=%s error=%s", self._run.name, error)
            self._is_base_usable = False
            return None

    def _from_anchor(self, version: int) -> Mirror:
        bad: set[str] = set()
        while True:
            try:
                step = plan_route(self._run, None, version, avoid=frozenset(bad)).steps[0]
            except NoRouteError:
                if self._run.record.parent is None:
                    raise
                return from_anchor_on_line(self._run, version, scratch=self._scratch)
            assert isinstance(step, AnchorStep), "from nothing, only an anchor is a first step"
            try:
                return self._load(self._fetched(step.record), "checkpoint", (step.to_version,))
            except (CorruptBlobError, UsageError) as error:
                log.warning("event=bad_anchor run=%s error=%s", self._run.name, error)
                bad.add(step.key)

    def _load(self, path: Path, view: str, versions: tuple[int, ...]) -> Mirror:
        with open_checkpoint(path) as checkpoint:
            mirror = Mirror.load(ViewReader(checkpoint, view), threads=self._threads)
        recognise(mirror, self._run, versions)
        return mirror

    def _fetched(self, anchor: AnchorRecord) -> Path:
        if self._kept is not None and self._kept[0] == anchor.version:
            return self._kept[1]
        self.close()
        try:
            if self._scratch is not None:
                self._scratch.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="stitch-anchor-", dir=self._scratch))
        except OSError as error:
            raise StoreError(f"cannot keep an anchor in the scratch directory: {error}") from error
        self._kept = anchor.version, folder / "checkpoint"
        try:
            self._run.fetch_anchor(anchor, folder / "checkpoint")
        except BaseException:
            self.close()
            raise
        return folder / "checkpoint"
