"""Weights held as torch tensors on any device, read as words where they are.

A tensor's words on a device are a flat integer tensor of the words' width: uint8, int16, int32 or
int64, whose bits are the storage words in logical order. Like torch_state, it imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stitch.errors import SchemaMismatchError
from stitch.tensors.reader import WeightReader, Words, spans, spec_for, word_dtype
from stitch.tensors.torch_state import (
    BITS,
    TORCH_DTYPES,
    check_fit,
    copy_words,
    named_tensors,
    select,
    spec_of,
)
from stitch.types import Schema, TensorSpec


class DeviceWeights:
    """A WeightReader over torch tensors that also gives their words where they live.

    `read` copies a span to the host (on the CPU it is a view). Two of these are compared and
    digested on their device by the codec, which finds them by their `device_words`. For tensors on
    the CPU that is right but slow: there the codec's kernels on HostWeights are several times as
    fast.
    """

    def __init__(self, schema: Schema, words: Sequence[torch.Tensor]) -> None:
        """Adopt one flat integer tensor of words per tensor, in schema order, on any devices."""
        if len(words) != len(schema):
            raise SchemaMismatchError(f"{len(schema)} tensors need {len(schema)} word tensors")
        for spec, tensor in zip(schema.tensors, words, strict=True):
            wanted = ((spec.num_words,), BITS[spec.word_bytes])
            if (tuple(tensor.shape), tensor.dtype) != wanted:
                raise SchemaMismatchError(
                    f"{spec} needs words {wanted}, got {tuple(tensor.shape)} {tensor.dtype}"
                )
        self._schema = schema
        self._words = list(words)

    @classmethod
    def of(cls, source: object, schema: Schema | None = None) -> DeviceWeights:
        """The live tensors of a module, a mapping or an iterable of (name, tensor).

        Contiguous tensors of the schema's dtype (default: the source's own schema) are not copied:
        what changes in them changes here. Others are copied once, on their device: into row-major
        order, or rounded to the schema's dtype. numpy arrays are copied to CPU tensors. Raises as
        `torch_state.select` does.
        """
        if schema is None:
            pairs = list(named_tensors(source))
            schema = Schema.of(spec_of(name, tensor) for name, tensor in pairs)
            source = pairs
        held = {spec.name: _all_words(spec, tensor) for spec, tensor in select(schema, source)}
        return cls(schema, [held[spec.name] for spec in schema.tensors])

    @classmethod
    def load(cls, reader: WeightReader, device: torch.device | str) -> DeviceWeights:
        """A copy on `device` of everything that `reader` holds."""
        words = []
        for spec in reader.schema.tensors:
            target = torch.empty(spec.num_words, dtype=BITS[spec.word_bytes], device=device)
            for start, stop in spans(spec):
                # A copy, because torch warns of arrays that it could write to and should not.
                part = np.array(reader.read(spec.name, start, stop))
                target[start:stop] = host_bits(part)
            words.append(target)
        return cls(reader.schema, words)

    @property
    def schema(self) -> Schema:
        return self._schema

    def read(self, name: str, start: int, stop: int) -> Words:
        """Words [start, stop) on the host: a copy, or a read-only view if they are there already.

        Waits for the device.
        """
        spec = spec_for(self._schema, name, start, stop)
        words = host_words(self.device_words(name, start, stop)).view(word_dtype(spec))
        words.flags.writeable = False
        return words

    def device_words(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Words [start, stop) as a flat integer tensor on its device: a view, not to be written."""
        spec_for(self._schema, name, start, stop)
        return self._words[self._schema.index[name]][start:stop]


def flat_source(spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in logical order, flat: bits if it has the spec's dtype, else floats.

    No copy if it is contiguous. `as_bits` makes words of a part of it. Raises as `spec_of` and
    `check_fit` do.
    """
    got = spec_of(spec.name, tensor)
    check_fit(got, spec)
    source = tensor.detach().resolve_conj().resolve_neg()
    if got.dtype == spec.dtype:
        # First the bits: torch cannot move every narrow float, but any integer.
        source = source.view(BITS[spec.word_bytes])
    return source.reshape(-1)


def as_bits(spec: TensorSpec, part: torch.Tensor) -> torch.Tensor:
    """The words of a part of a `flat_source`, rounded to the spec's dtype if need be."""
    if part.dtype == BITS[spec.word_bytes]:
        return part
    return part.to(TORCH_DTYPES[spec.dtype]).view(BITS[spec.word_bytes])


def host_words(words: torch.Tensor) -> Words:
    """Flat integer words on the host: a copy, or a view if they are there and contiguous."""
    signed = words.contiguous().cpu().numpy()
    unsigned: Words = signed.view(f"<u{signed.itemsize}")
    return unsigned


def host_bits(words: Words) -> torch.Tensor:
    """Contiguous, writable host words as an integer tensor: the same memory."""
    signed: Any = words.view("u1" if words.itemsize == 1 else f"<i{words.itemsize}")
    return torch.from_numpy(signed)


def _all_words(spec: TensorSpec, tensor: Any) -> torch.Tensor:
    if isinstance(tensor, np.ndarray):
        words = np.empty(spec.num_words, word_dtype(spec))
        copy_words(spec, tensor, words)
        return host_bits(words)
    return as_bits(spec, flat_source(spec, tensor))
