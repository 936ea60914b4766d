"""Copying a source's weights into a host buffer: all that `publish` blocks its caller for."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from stitch.errors import SchemaMismatchError, UsageError
from stitch.publish.settings import SnapshotMode
from stitch.tensors import HostWeights, WeightReader
from stitch.tensors.names import describe_mismatch
from stitch.types import Schema
from stitch.views import ViewReader

if TYPE_CHECKING:
    import torch

    from stitch.publish.shadow import Shadow

WeightSource: TypeAlias = (
    "torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any]] | WeightReader"
)


class Snapshot:
    """One source, checked as far as it can be before a word is copied."""

    def __init__(self, source: WeightSource, schema: Schema, view: str) -> None:
        """Raises SchemaMismatchError if names, dtypes or shapes are known and wrong."""
        self._schema = schema
        self.is_checked = False
        """Whether all tensors are held and fit: copying them has nothing left to fail at."""
        if is_reader(source):
            self._reader: WeightReader | None = ViewReader(source, view)
            check_schema(self._reader.schema, schema)
            return
        try:
            from stitch.tensors import torch_state
        except ImportError as error:
            raise UsageError(
                "publishing live tensors needs torch; without it, publish a checkpoint "
                "(stitch.tensors.open_checkpoint)"
            ) from error
        self._reader = None
        self._copy_words = torch_state.copy_words
        self._tensors = torch_state.select(schema, source)
        self.is_checked = isinstance(source, Mapping | Collection) or hasattr(source, "state_dict")

    def write_to(self, buffer: HostWeights, shadow: Shadow | None = None) -> None:
        """Fill `buffer`; with a shadow, from tensors of which only what changed is copied.

        Raises what the source raises, and SchemaMismatchError at the end of an iterator whose
        tensors do not fit; the buffer then holds a mixture.
        """
        if self._reader is not None:
            buffer.fill(self._reader)
            return
        if shadow is not None:
            shadow.fill(buffer, self._tensors)
            return
        for spec, tensor in self._tensors:
            self._copy_words(spec, tensor, buffer.words(spec.name))


def shadow_for(mode: SnapshotMode, schema: Schema) -> Shadow | None:
    """What snapshots are compared with in mode "device"; UsageError if torch is not there."""
    if mode == "host":
        return None
    try:
        from stitch.publish.shadow import Shadow
    except ImportError as error:
        raise UsageError("snapshot='device' needs torch") from error
    return Shadow(schema)


def is_reader(source: object) -> TypeGuard[WeightReader]:
    return isinstance(getattr(source, "schema", None), Schema) and hasattr(source, "read")


def check_schema(found: Schema, wanted: Schema) -> None:
    """Raise SchemaMismatchError that lists the tensors in which two schemas differ."""
    if found.digest == wanted.digest:
        return
    unknown = [name for name in found.index if name not in wanted]
    missing = [name for name in wanted.index if name not in found]
    both = [(found[name], wanted[name]) for name in found.index if name in wanted]
    reshaped = [(got, want) for got, want in both if got != want]
    raise SchemaMismatchError(
        describe_mismatch(wanted, unknown=unknown, missing=missing, reshaped=reshaped)
    )


def check_step(step: object) -> int | None:
    """A trainer's step as an int (numpy's included), or UsageError."""
    if step is None:
        return None
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"step must be an integer or None, got {step!r}") from None
    if not -(2**63) <= number < 2**63:
        raise UsageError(f"step must fit into 64 bits, got one of {number.bit_length()} bits")
    return number
