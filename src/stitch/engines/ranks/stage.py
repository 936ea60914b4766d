"""One rank's stage: parts of an update set, placed and checked as they arrive."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from stitch.codec import UpdateSet
from stitch.engines.parts import MAX_NUM_PARTS
from stitch.engines.placement.live import LiveTensors
from stitch.engines.placement.placement import Placement
from stitch.engines.placement.scatter import Staged
from stitch.errors import EngineError, UsageError
from stitch.types import Schema

MAX_PART_BYTES = 1 << 31


@dataclass(eq=False)
class Target:
    """What a rank's stages write to. `ties`: names that share their live words."""

    schema: Schema
    live: LiveTensors
    placement: Placement
    refused: Mapping[str, str]
    ties: list[frozenset[str]]
    dense_limit_bytes: int


@dataclass(eq=False)
class Stage:
    """A stage that is filled part by part and then sealed."""

    stage_id: str
    target: Target
    sealed: bool = False
    num_changed: int = 0
    _digests: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tied = [name for group in self.target.ties for name in group]
        self.staged = Staged(
            self.target.live, tied=tied, dense_limit_bytes=self.target.dense_limit_bytes
        )

    def put(self, number: int, data: bytearray) -> None:
        """Take one part, for good; the same again is ignored."""
        if self.sealed:
            raise UsageError(f"stage {self.stage_id!r} is sealed")
        if not 0 <= number < MAX_NUM_PARTS:
            raise UsageError(f"part number must be in 0..{MAX_NUM_PARTS - 1}, got {number}")
        digest = blake3(data).digest()
        known = self._digests.get(number)
        if known is not None:
            if known != digest:
                raise UsageError(f"part {number} was already sent with other bytes")
            return
        part = UpdateSet.from_bytes(memoryview(data), self.target.schema)
        for update in part.updates:
            spec = self.target.schema.tensors[update.tensor]
            reason = self.target.refused.get(spec.name)
            if reason is not None:
                raise EngineError(f"tensor {spec.name} cannot be changed in place: {reason}")
            self.staged.add(update, spec, self.target.placement)
        self._digests[number] = digest
        self.num_changed += part.num_changed

    def seal(self, num_parts: int, num_changed: int) -> None:
        """End the stage; raises UsageError unless exactly these parts and changes came."""
        if self.sealed:
            return
        if set(self._digests) != set(range(min(num_parts, MAX_NUM_PARTS))):
            raise UsageError(f"stage has parts {sorted(self._digests)[:10]}, announced {num_parts}")
        if self.num_changed != num_changed:
            raise UsageError(f"stage changes {self.num_changed} elements, {num_changed} announced")
        self.staged.check_ties(self.target.ties)
        self.staged.seal()
        self.sealed = True


def read_part(source: bytes | str) -> bytearray:
    """A part's bytes: themselves, or the content of a regular file of this user's."""
    if not isinstance(source, str):
        return bytearray(source)
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(f"cannot read the part {source!r}: {error}") from error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
            raise EngineError(f"{source!r} is not a regular file of this user")
        if info.st_size > MAX_PART_BYTES:
            raise EngineError(f"{source!r} has {info.st_size} bytes, over {MAX_PART_BYTES}")
        data = bytearray(info.st_size)
        view = memoryview(data)
        done = 0
        while done < len(data):
            count = file.readinto(view[done:])
            if not count:
                raise EngineError(f"{source!r} ends after {done} of {len(data)} bytes")
            done += count
    return data
