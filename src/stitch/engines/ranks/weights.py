"""RankWeights: one rank's live weights behind the `Rank` port. Imports torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from stitch import failpoints
from stitch.engines.placement.copies import split_copies
from stitch.engines.placement.record import Load
from stitch.engines.ranks.lanes import Split, live_terms
from stitch.engines.ranks.learning import Build, Learned, learn
from stitch.engines.ranks.port import Answer, failure
from stitch.engines.ranks.stage import Stage, Target, read_part
from stitch.engines.ranks.tasks import Tasks
from stitch.errors import EngineError, FatalReplicaError, SchemaMismatchError, UsageError
from stitch.tensors.reader import WeightReader
from stitch.types import Schema


class RankWeights:
    """Implements `Rank`. Construction does nothing but keep its arguments."""

    def __init__(
        self,
        model: torch.nn.Module,
        schema: Schema,
        *,
        rank: int,
        world: int,
        load: Load,
        reader: WeightReader,
        build: Build | None = None,
        dense_limit_bytes: int = 1 << 32,
    ) -> None:
        """`model` holds the weights of `reader` (whose schema is `schema`), loaded by the engine.

        load: the engine's own loader for (name, tensor) pairs, say `model.load_weights`; it is only
        ever run with its writes caught. build: makes a second model by the engine's whole start-up
        path, with any repacking after the load, from pairs that fill all of it; without it, names
        whose layout is changed after the load are refused. dense_limit_bytes: memory that a stage
        may spend on whole regions where a copy is faster than single writes.
        """
        self._model = model
        self._schema = schema
        self._where = {"rank": rank, "world": world}
        self._load, self._reader, self._build = load, reader, build
        self._dense_limit_bytes = dense_limit_bytes
        self._lock = threading.RLock()
        self._tasks = Tasks()
        self._learned: Learned | None = None
        self._answer: Answer = {}
        self._target: Target | None = None
        self._splits: dict[str, Split] = {}
        self._stage: Stage | None = None
        self._last: Stage | None = None
        """The stage whose commit can be undone."""
        self._epoch = 0
        """Writes so far."""
        self._states = ["", ""]
        """The stage committed before the last one, and the last one; the same on all ranks."""
        self._doubt: str | None = None

    # --- learning ----------------------------------------------------------------------------

    def learn(self) -> Answer:
        """See `Rank`."""
        return self._answered(self._learn)

    def _learn(self) -> Answer:
        if self._learned is not None:
            return self._answer
        if self._reader.schema.digest != self._schema.digest:
            raise SchemaMismatchError(
                f"the reader has schema {self._reader.schema.digest}, not {self._schema.digest}"
            )
        begin = time.perf_counter()
        learned = learn(self._model, self._schema, self._load, self._reader, self._build)
        names = {}
        for name in learned.placement:
            blocks = split_copies(learned.placement[name], self._schema[name].num_words)
            self._splits[name] = blocks
            names[name] = [block.elements.to_json() for block in blocks[0]]
        self._learned = learned
        self._answer = {
            **self._where,
            "schema": self._schema.digest,
            "names": names,
            "refused": learned.refused,
            "twins": learned.twins,
            "notes": learned.notes,
            "seconds_s": time.perf_counter() - begin,
        }
        return self._answer

    def settle(self, settlement: Mapping[str, Any]) -> Answer:
        """See `Rank`."""

        def work() -> Answer:
            learned = self._learned
            if learned is None:
                raise UsageError("settle comes after learn")
            refused, twins = dict(settlement["refused"]), dict(settlement["twins"])
            placement = learned.placement.without(refused)
            placement = placement.with_blocks(
                {name: placement[twin] for name, twin in twins.items()}
            )
            for name, twin in twins.items():
                if twin in self._splits:
                    self._splits[name] = self._splits[twin]
            self._target = Target(
                self._schema,
                learned.live,
                placement,
                refused,
                placement.ties(),
                self._dense_limit_bytes,
            )
            self._stage = self._last = None
            return {}

        return self._answered(work)

    def describe(self) -> Answer:
        """See `Rank`."""

        def work() -> Answer:
            target, learned = self._target, self._learned
            return {
                **self._where,
                "learned": learned is not None,
                "settled": target is not None,
                "num_tensors": len(self._schema),
                "num_blocks": target.placement.num_blocks if target else 0,
                "live_bytes": learned.live.num_bytes if learned else 0,
                "refused": dict(target.refused) if target else {},
                "staged": self._stage.stage_id if self._stage and self._stage.sealed else None,
                "committed": self._last.stage_id if self._last else None,
                "epoch": self._epoch,
                "doubt": self._doubt,
            }

        return self._answered(work, even_in_doubt=True)

    # --- the transaction ---------------------------------------------------------------------

    def stage_part(self, stage_id: str, number: int, source: bytes | str) -> Answer:
        """See `Rank`."""

        def work() -> Answer:
            if self._target is None:
                raise UsageError("a stage comes after settle")
            if self._stage is None or self._stage.stage_id != stage_id:
                self._last = None
                self._stage = Stage(stage_id, self._target)
            self._stage.put(number, read_part(source))
            return {}

        return self._answered(work, drops_stage=True)

    def seal(self, stage_id: str, num_parts: int, num_changed: int) -> Answer:
        """See `Rank`."""

        def work() -> Answer:
            stage = self._staged(stage_id)
            stage.seal(num_parts, num_changed)
            it = stage.staged
            return {
                "num_local": it.num_local,
                "dense_bytes": it.dense_bytes,
                "held_bytes": it.held_bytes,
            }

        return self._answered(work, drops_stage=True)

    def _staged(self, stage_id: str) -> Stage:
        if self._stage is None or self._stage.stage_id != stage_id:
            raise EngineError(f"no stage {stage_id!r} is held")
        return self._stage

    def commit(self, stage_id: str) -> Answer:
        """See `Rank`."""

        def work() -> Answer:
            if self._last is not None and self._last.stage_id == stage_id:
                return {"write_ms": 0.0}
            stage = self._staged(stage_id)
            if not stage.sealed:
                raise EngineError(f"stage {stage_id!r} is not sealed")
            begin = time.perf_counter()
            self._epoch += 1
            try:
                self._write(stage)
            except Exception as error:
                self._stage = None
                self._restore(stage, error)
                raise EngineError(f"the commit failed and was undone: {error}") from error
            self._stage, self._last = None, stage
            self._states = [self._states[-1], stage_id]
            return {"write_ms": 1e3 * (time.perf_counter() - begin)}

        return self._answered(work)

    def _write(self, stage: Stage) -> None:
        failpoints.reach("rank-write")
        stage.staged.write()
        failpoints.reach("rank-written")

    def _restore(self, stage: Stage, cause: Exception) -> None:
        """Old words back after a failed commit, or doubt."""
        try:
            stage.staged.undo()
        except Exception as error:
            raise FatalReplicaError(f"{cause}; restoring the old words failed: {error}") from error

    def undo(self, stage_id: str) -> Answer:
        """See `Rank`."""

        def work() -> Answer:
            stage = self._last
            if stage is None or stage.stage_id != stage_id:
                return {"undone": False}
            self._epoch += 1
            self._restore(stage, EngineError("a roll-back was asked for"))
            self._last = None
            self._states[-1] = self._states[0]
            return {"undone": True}

        return self._answered(work)

    def discard(self) -> Answer:
        """See `Rank`."""

        def work() -> Answer:
            self._stage = None
            return {}

        return self._answered(work)

    def forget(self) -> Answer:
        """See `Rank`."""

        def work() -> Answer:
            self._stage = self._last = None
            return {}

        return self._answered(work)

    # --- proof -------------------------------------------------------------------------------

    def lanes(self, names: Sequence[str] | None = None) -> Answer:
        """See `Rank`."""
        try:
            return {"ok": True, **self._lanes(names)}
        except Exception as error:
            return failure(error)

    def _lanes(self, names: Sequence[str] | None) -> Answer:
        with self._locked():
            target, epoch, state = self._target, self._epoch, self._states[-1]
            if target is None:
                raise UsageError("lanes come after settle")
        wanted = list(target.placement) if names is None else list(names)
        unknown = [name for name in wanted if name not in self._schema]
        if unknown:
            raise SchemaMismatchError(f"no tensors are named {unknown[:5]}")
        terms, differing = live_terms(
            [name for name in wanted if name in target.placement],
            self._splits,
            target.live,
            self._schema,
            lambda: self._locked(epoch),
        )
        return {**self._where, "state": state, "terms": terms, "differing": differing}

    # --- calls in threads --------------------------------------------------------------------

    def begin(self, ticket: str, method: str, args: Sequence[Any]) -> Answer:
        """See `Rank`."""
        calls: dict[str, Callable[..., Answer]] = {
            "stage_part": self.stage_part,
            "seal": self.seal,
            "lanes": self.lanes,
        }
        try:
            if method not in calls:
                raise UsageError(f"{method!r} cannot be begun; {sorted(calls)} can")
            self._tasks.begin(ticket, lambda: calls[method](*args))
            return {"ok": True}
        except Exception as error:
            return failure(error)

    def finish(self, ticket: str, wait_s: float = 0.0) -> Answer:
        """See `Rank`."""
        try:
            return self._tasks.finish(ticket, wait_s)
        except Exception as error:
            return failure(error)

    # --- answering ---------------------------------------------------------------------------

    @contextmanager
    def _locked(self, epoch: int | None = None) -> Iterator[None]:
        """Hold writers off; EngineError if there was one since `epoch`."""
        with self._lock:
            if epoch is not None and epoch != self._epoch:
                raise EngineError("the weights changed while they were digested; ask again")
            yield

    def _answered(
        self, work: Callable[[], Answer], *, drops_stage: bool = False, even_in_doubt: bool = False
    ) -> Answer:
        """Run `work`; whatever it raises becomes an answer. Nothing leaves this method."""
        with self._lock:
            try:
                if self._doubt is not None and not even_in_doubt:
                    raise FatalReplicaError(f"what this rank holds is in doubt: {self._doubt}")
                return {"ok": True, **work()}
            except FatalReplicaError as error:
                self._doubt = str(error)
                return failure(error)
            except Exception as error:
                if drops_stage:
                    self._stage = None
                return failure(error)
