"""Cutting an update set into parts that fit a request, and gathering them again."""

from __future__ import annotations

from collections.abc import Iterator

from stitch.codec import TensorUpdate, UpdateSet
from stitch.errors import UsageError
from stitch.types import Schema

MAX_PART_BYTES = 32 * 2**20
"""Size a sender aims at."""
MAX_RECEIVED_PART_BYTES = 4 * MAX_PART_BYTES
MAX_NUM_PARTS = 100_000
_SLACK_BYTES = 2**20


def split_update(update: UpdateSet, max_bytes: int = MAX_PART_BYTES) -> Iterator[UpdateSet]:
    """Yield update sets of at most about `max_bytes`; at least one, even when nothing changed."""
    batch: list[TensorUpdate] = []
    room = max_bytes
    for piece in _pieces(update, max_bytes):
        size = piece.num_bytes
        if batch and size > room:
            yield UpdateSet(batch)
            batch, room = [], max_bytes
        batch.append(piece)
        room -= size
    yield UpdateSet(batch)


def _pieces(update: UpdateSet, max_bytes: int) -> Iterator[TensorUpdate]:
    for item in update.updates:
        per_word = max(1, item.num_bytes // max(1, len(item.new)))
        step = max(1, max_bytes // per_word)
        for at in range(0, len(item.new), step):
            yield _cut(item, at, min(at + step, len(item.new)))


def _cut(item: TensorUpdate, start: int, stop: int) -> TensorUpdate:
    """Entries `start` to `stop` of one tensor's update."""
    return TensorUpdate(
        tensor=item.tensor,
        positions=None if item.positions is None else item.positions[start:stop],
        start=item.start + start if item.positions is None else item.start,
        new=item.new[start:stop],
        old=item.old[start:stop],
    )


class PartsBox:
    """Parts of one stage as they arrive: any order, repeats allowed when identical.

    No more bytes are held than a full rewrite of `schema` with positions would need.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._parts: dict[int, bytes] = {}
        self._room_bytes = sum(t.num_words * (8 + 2 * t.word_bytes) for t in schema.tensors)

    def put(self, number: int, data: bytes) -> None:
        if not 0 <= number < MAX_NUM_PARTS:
            raise UsageError(f"part number must be in 0..{MAX_NUM_PARTS - 1}, got {number}")
        held = self._parts.get(number)
        if held is not None:
            if held != data:
                raise UsageError(f"part {number} was already sent with other bytes")
            return
        if sum(map(len, self._parts.values())) + len(data) > self._limit_bytes:
            raise UsageError(
                f"part {number} brings the stage over {self._limit_bytes} bytes, more than a "
                "rewrite of every tensor needs"
            )
        self._parts[number] = data

    @property
    def _limit_bytes(self) -> int:
        return self._room_bytes + _SLACK_BYTES * (1 + len(self._parts))

    def seal(self, num_parts: int, num_changed: int) -> UpdateSet:
        """The whole update set; raises UsageError unless exactly these parts and changes came."""
        missing = sorted(set(range(min(num_parts, MAX_NUM_PARTS))) - set(self._parts))
        if missing or len(self._parts) != num_parts:
            raise UsageError(
                f"stage has {len(self._parts)} parts, {num_parts} announced; "
                f"missing: {missing[:10]}"
            )
        updates: list[TensorUpdate] = []
        for number in range(num_parts):
            updates.extend(UpdateSet.from_bytes(self._parts[number], self._schema).updates)
        whole = UpdateSet(updates)
        if whole.num_changed != num_changed:
            raise UsageError(f"stage changes {whole.num_changed} elements, {num_changed} announced")
        return whole
