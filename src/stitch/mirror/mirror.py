"""The mirror: a view's weights in host memory, at one proven version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from stitch.board import Run
from stitch.codec import DigestState, UpdateSet, decode_parts, diff_update
from stitch.errors import BaseMismatchError, CorruptBlobError, UsageError
from stitch.mirror.advance import Advance
from stitch.mirror.fetch import fetch_parts, fetched_anchor
from stitch.records import AnchorRecord, Manifest, MergedPatch
from stitch.tensors import HostWeights, WeightReader
from stitch.tensors.reader import Progress
from stitch.types import Schema, VersionRef


class Mirror:
    """Host copy of a view, its digest, and the version whose content it provably has.

    Memory: the view once, 16 bytes per tensor of digest lanes, and while a version is applied its
    patch bytes and its update set (old and new bits of the changed elements). Not thread-safe:
    one owner moves it.
    """

    def __init__(
        self, *, weights: HostWeights, digests: DigestState, ref: VersionRef | None = None
    ) -> None:
        """Adopt weights of known digest state; `ref` is the version they were proven to be."""
        self.weights = weights
        self.ref = ref
        self._set_digests(digests)

    @classmethod
    def load(
        cls, reader: WeightReader, progress: Progress | None = None, threads: int | None = None
    ) -> Mirror:
        """Copy everything `reader` holds. Which version that is, `identify` finds out."""
        weights = HostWeights.load(reader, progress)
        return cls(weights=weights, digests=DigestState.of(weights, threads=threads))

    @classmethod
    def from_anchor(
        cls,
        run: Run,
        anchor: AnchorRecord,
        *,
        scratch: Path | None = None,
        progress: Progress | None = None,
    ) -> Mirror:
        """A mirror at an anchor's version, without any weights to start from.

        Needs the view's bytes in `scratch` (default: the system's temporary directory) while it
        runs. Raises CorruptBlobError if what was fetched is not what the anchor promises.
        """
        with fetched_anchor(run, anchor, scratch, progress) as reader:
            mirror = cls.load(reader)
        _check_anchor_digest(run, anchor, mirror.digests)
        mirror.ref = VersionRef(run.name, anchor.version)
        return mirror

    def copy(self) -> Mirror:
        """Another mirror at the same version, with weights of its own."""
        return Mirror(
            weights=HostWeights.load(self.weights), digests=self._digests.copy(), ref=self.ref
        )

    @property
    def schema(self) -> Schema:
        return self.weights.schema

    @property
    def digests(self) -> DigestState:
        return self._digests

    @property
    def digest(self) -> str:
        """The version digest (32 hex digits) of the weights as they are."""
        return self._digest

    def _set_digests(self, digests: DigestState) -> None:
        self._digests = digests
        self._digest = digests.version_digest()

    def identify(self, run: Run, versions: Iterable[int] = ()) -> VersionRef:
        """Find out which version of `run` these weights are, by digest, and remember it.

        The base is always compared; `versions` lists further ones to compare, newest first.
        Raises BaseMismatchError if it is none of them.
        """
        self._check_schema(run)
        if self._digest == run.record.base_digest:
            self.ref = VersionRef(run.name, 0)
            return self.ref
        for version in versions:
            if version > 0 and run.manifest(version).digest_after == self._digest:
                self.ref = VersionRef(run.name, version)
                return self.ref
        raise BaseMismatchError(
            f"these weights are not the base of run {run.name!r}: expected digest "
            f"{run.record.base_digest} (view {run.record.view!r} of {run.record.base}), found "
            f"{self._digest}; start from that base, or from an anchor of the run"
        )

    def enter(self, fork: Run) -> None:
        """Go from the version that `fork` was forked from to its version 0: the same weights.

        Raises BaseMismatchError if they are not its base.
        """
        if self.ref != fork.record.parent or self._digest != fork.record.base_digest:
            raise BaseMismatchError(
                f"run {fork.name!r} was forked from {fork.record.parent} with digest "
                f"{fork.record.base_digest}; the mirror holds {self.ref} with digest {self._digest}"
            )
        self.ref = VersionRef(fork.name, 0)

    def _check_schema(self, run: Run) -> None:
        if self.schema.digest == run.schema.digest:
            return
        ours = {str(spec) for spec in self.schema.tensors}
        wanted = {str(spec) for spec in run.schema.tensors}
        raise BaseMismatchError(
            f"these tensors are not those of run {run.name!r} (view {run.record.view!r}): "
            f"missing {_some(wanted - ours)}; unexpected {_some(ours - wanted)}; "
            f"start from the run's base, {run.record.base}"
        )

    def step(
        self,
        run: Run,
        patch: Manifest | MergedPatch,
        parts: Sequence[bytes] | None = None,
        *,
        threads: int | None = None,
    ) -> UpdateSet:
        """Move over one patch, merged or not: fetch it (unless given), decode, prove, apply.

        Returns what changed. Whatever is raised (BaseMismatchError, CorruptPatchError,
        CorruptBlobError, a store's errors), the mirror is as it was.
        """
        self._check_start(run, patch)
        if parts is None:
            parts = fetch_parts(run, patch)
        update, digests = decode_parts(
            parts, self.weights, self._digests, digest_after=patch.digest_after, threads=threads
        )
        self._apply(update, digests, VersionRef(run.name, patch.version))
        return update

    def _check_start(self, run: Run, patch: Manifest | MergedPatch) -> None:
        base = VersionRef(run.name, patch.base_version)
        if self.ref != base or self._digest != patch.digest_before:
            raise BaseMismatchError(
                f"the patch to version {patch.version} of run {run.name!r} starts from {base} with "
                f"digest {patch.digest_before}; the mirror holds {self.ref} with digest "
                f"{self._digest}; advance it to {base} first"
            )

    def jump(
        self,
        run: Run,
        anchor: AnchorRecord,
        scratch: Path | None = None,
        progress: Progress | None = None,
    ) -> UpdateSet:
        """Move to an anchor's version, from any weights of the same schema.

        Fetches the whole version into `scratch` and compares it with what is held, so the update
        set may in the worst case hold the view twice. Raises as `step` does, mirror unchanged.
        """
        self._check_schema(run)
        with fetched_anchor(run, anchor, scratch, progress) as reader:
            update = diff_update(self.weights, reader)
        digests = self._digests.updated(update, self.weights)
        _check_anchor_digest(run, anchor, digests)
        self._apply(update, digests, VersionRef(run.name, anchor.version))
        return update

    def _apply(self, update: UpdateSet, digests: DigestState, ref: VersionRef) -> None:
        before = (self._digests, self._digest, self.ref)
        try:
            update.apply(self.weights)
            self._set_digests(digests)
            self.ref = ref
        except BaseException:
            update.undo(self.weights)  # harmless where nothing was written yet
            self._digests, self._digest, self.ref = before
            raise

    def undo(self, update: UpdateSet, ref: VersionRef, digests: DigestState) -> None:
        """Go back over `update`, which led here, to `ref`, whose digest state was `digests`.

        Raises BaseMismatchError, mirror unchanged, if undoing does not lead to those digests.
        """
        reached = self._digests.updated(_inverse(update), self.weights).version_digest()
        if reached != digests.version_digest():
            raise BaseMismatchError(
                f"undoing from {self.ref} leads to digest {reached}, not to {ref} with digest "
                f"{digests.version_digest()}: it is not the update set that led here"
            )
        update.undo(self.weights)
        self._set_digests(digests)
        self.ref = ref

    def advance(
        self,
        run: Run,
        target: int | None = None,
        *,
        scratch: Path | None = None,
        progress: Progress | None = None,
        stop: Callable[[], bool] | None = None,
        threads: int | None = None,
    ) -> UpdateSet:
        """Move to `target` (default: the newest version) on the cheapest route that works.

        Returns the composed update set that leads from where the mirror stood to where it stands,
        `ref`. That is before `target` if `stop()`, asked between steps, returned True. While one
        version is decoded the next one's blobs are fetched, so two versions' patch bytes are held,
        plus the old and new bits of everything that changed so far. `progress` counts the bytes of
        the route.

        Raises AdvanceError, with the update set in `.partial`, if it cannot get further; UsageError
        if the mirror does not know its version or that of another run. Any other exception leaves
        the mirror where it started.
        """
        if self.ref is None or self.ref.run != run.name:
            raise UsageError(
                f"the mirror holds {self.ref}, not a version of run {run.name!r}: identify it first"
            )
        moving = Advance(self, run, scratch=scratch, progress=progress, stop=stop, threads=threads)
        return moving.to(target)


def _check_anchor_digest(run: Run, anchor: AnchorRecord, digests: DigestState) -> None:
    found = digests.version_digest()
    if found != anchor.digest:
        raise CorruptBlobError(
            f"anchor {anchor.version} of run {run.name!r} has digest {found}, "
            f"its record says {anchor.digest}"
        )


def _inverse(update: UpdateSet) -> UpdateSet:
    return UpdateSet([replace(part, new=part.old, old=part.new) for part in update.updates])


def _some(names: Iterable[str], limit: int = 5) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return (", ".join(listed[:limit]) or "none") + more
