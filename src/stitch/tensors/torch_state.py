"""A trainer's live tensors: bit-exact copies into host words, names and ties.

Only this module and `device` import torch here. It takes a torch module, a mapping or any
iterable of (name, tensor); tensors are torch tensors on any device or numpy arrays, and are never
written to. Same dtype means the same bits; otherwise a float is rounded to the schema's dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from stitch.errors import SchemaMismatchError, UnsupportedDtypeError, UsageError
from stitch.tensors import numpy_state
from stitch.tensors.names import (
    NameTable,
    canonical_name,
    collision,
    describe_mismatch,
    match_names,
)
from stitch.tensors.reader import Words, word_dtype
from stitch.types import Schema, TensorSpec

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    getattr(torch, torch_name): name
    for torch_name, name in {**numpy_state.DTYPE_NAMES, "float4_e2m1fn_x2": "F4"}.items()
    if hasattr(torch, torch_name)
}
"""torch dtype -> safetensors dtype, for what this torch has. A float4_e2m1fn_x2 holds two F4."""

TORCH_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""safetensors dtype -> torch dtype."""

ROUNDINGS: Mapping[str, frozenset[str]] = {
    "BF16": frozenset({"F16", "F32", "F64"}),
    "F16": frozenset({"F32", "F64"}),
}
"""Served dtype -> dtypes that are rounded to it. Widening is refused: precision is lost already."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Word bytes -> the integer dtype through which bits are copied untouched."""


def named_tensors(source: object) -> Iterator[tuple[str, Any]]:
    """(canonical name, tensor) of a module's state dict, a mapping or an iterable of pairs.

    Second names of tied weights come along; `select` sorts them out. Non-persistent buffers of a
    module do not. Raises SchemaMismatchError when two names become one, UsageError for a source or
    a value that is not made of plain tensors.
    """
    origins: dict[str, str] = {}
    for name, tensor in _pairs(source):
        canonical = canonical_name(name)
        if canonical in origins:
            raise SchemaMismatchError(collision(origins[canonical], name, canonical))
        origins[canonical] = name
        yield canonical, tensor


def select(schema: Schema, source: object) -> Iterator[tuple[TensorSpec, Any]]:
    """Yield every tensor of the schema with its spec, exactly once.

    A module, a mapping or a collection of pairs is checked in full before the first tensor comes:
    names, ties, dtypes and shapes; a second name of a tied weight is dropped unless the schema has
    it. Any other iterable is checked as it streams, so some problems show only at its end; ties
    cannot be recognised there (memory may be reused between items), so every name must be known.
    Raises SchemaMismatchError that lists what is unknown, missing or reshaped.
    """
    if isinstance(source, torch.nn.Module | Mapping | Collection):
        return _select_held(schema, list(_pairs(source)))
    return _select_streamed(schema, _pairs(source))


def spec_of(name: str, tensor: Any) -> TensorSpec:
    """The spec of a torch tensor or numpy array as safetensors would store it.

    Raises UsageError for a tensor without plain strided data, UnsupportedDtypeError for a dtype
    that safetensors cannot hold.
    """
    if isinstance(tensor, np.ndarray):
        return numpy_state.spec_of(name, tensor)
    _check_plain(name, tensor)
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None:
        raise UnsupportedDtypeError(f"tensor {name!r}: safetensors cannot hold {tensor.dtype}")
    shape = list(tensor.shape)
    if dtype == "F4":
        if not shape:
            raise UnsupportedDtypeError(f"tensor {name!r}: F4 needs at least one dimension")
        shape[-1] *= 2
    return TensorSpec.of(name, dtype, shape)


def copy_words(spec: TensorSpec, tensor: Any, out: Words) -> None:
    """Write a tensor's words, in logical order, into `out` (`spec.num_words` long, writable).

    The shape must be the spec's. Bits are kept if the dtype is the spec's; ROUNDINGS lists the
    casts (to nearest, ties to even). Raises SchemaMismatchError or what `spec_of` raises.
    """
    got = spec_of(spec.name, tensor)
    check_fit(got, spec)
    if (out.shape, out.dtype) != ((spec.num_words,), word_dtype(spec)):
        raise UsageError(f"{spec} does not fit into an array {out.shape} {out.dtype}")
    if isinstance(tensor, np.ndarray):
        numpy_state.copy_words(spec, got, tensor, out)
        return
    source = tensor.detach().resolve_conj().resolve_neg()
    if got.dtype != spec.dtype:
        target = torch.from_numpy(out.view(np.int16)).view(TORCH_DTYPES[spec.dtype])
        if source.device.type != "cpu":
            source = source.to(target.dtype)
        target.view(source.shape).copy_(source)
        return
    bits = BITS[spec.word_bytes]
    target = torch.from_numpy(out.view(f"i{spec.word_bytes}" if spec.word_bytes > 1 else "u1"))
    target.view(source.shape).copy_(source.view(bits))


def words_of(tensor: torch.Tensor) -> Words:
    """The words of a contiguous CPU tensor, as a writable view of its own memory: no copy."""
    spec = spec_of("", tensor)
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError(
            f"words in place need a contiguous CPU tensor, got {spec.dtype}{list(tensor.shape)} on "
            f"{tensor.device} with strides {tensor.stride()}"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError("words in place need a tensor without a pending conjugation or negation")
    bits = tensor.detach().view(BITS[spec.word_bytes]).reshape(-1)
    words: Words = bits.numpy().view(word_dtype(spec))
    return words


def check_fit(got: TensorSpec, wanted: TensorSpec) -> None:
    """Raise SchemaMismatchError unless a tensor can be served as the schema wants it."""
    if not fits(got, wanted):
        raise SchemaMismatchError(describe_mismatch(Schema((wanted,)), reshaped=[(got, wanted)]))


def fits(got: TensorSpec, wanted: TensorSpec) -> bool:
    """Same shape, and the same dtype or one that is rounded to it."""
    same = got.dtype == wanted.dtype or got.dtype in ROUNDINGS.get(wanted.dtype, ())
    return same and got.shape == wanted.shape


def aliases(tensors: Iterable[tuple[str, Any]]) -> list[frozenset[str]]:
    """Groups of names that stand for the same memory, laid out the same way.

    Empty tensors have no memory and are never tied. All tensors must be alive at once.
    """
    groups: dict[object, set[str]] = {}
    for name, tensor in tensors:
        key = _identity(tensor)
        if key is not None:
            groups.setdefault(key, set()).add(name)
    return [frozenset(group) for group in groups.values() if len(group) > 1]


def _select_held(schema: Schema, pairs: list[tuple[str, Any]]) -> Iterator[tuple[TensorSpec, Any]]:
    match = match_names(schema, (name for name, _ in pairs), aliases=aliases(pairs))
    tensors = {match.chosen[name]: tensor for name, tensor in pairs if name in match.chosen}
    specs = [(spec_of(spec.name, tensors[spec.name]), spec) for spec in schema.tensors]
    reshaped = [(got, wanted) for got, wanted in specs if not fits(got, wanted)]
    if reshaped:
        raise SchemaMismatchError(describe_mismatch(schema, reshaped=reshaped))
    return ((spec, tensors[spec.name]) for spec in schema.tensors)


def _select_streamed(
    schema: Schema, pairs: Iterable[tuple[str, Any]]
) -> Iterator[tuple[TensorSpec, Any]]:
    table = NameTable(schema)
    origins: dict[str, str] = {}
    unknown: list[str] = []
    reshaped: list[tuple[TensorSpec, TensorSpec]] = []
    for name, tensor in pairs:
        target = table.find(name)
        if target is None:
            unknown.append(name)
            continue
        if target in origins:
            raise SchemaMismatchError(collision(origins[target], name, target))
        origins[target] = name
        got, wanted = spec_of(target, tensor), schema[target]
        if fits(got, wanted):
            yield wanted, tensor
        else:
            reshaped.append((got, wanted))
    missing = [name for name in schema.index if name not in origins]
    if unknown or missing or reshaped:
        message = describe_mismatch(schema, unknown=unknown, missing=missing, reshaped=reshaped)
        if unknown:
            message += "; if these are second names of tied weights, give the module or a mapping"
        raise SchemaMismatchError(message)


def _pairs(source: object) -> Iterator[tuple[str, Any]]:
    """The (name, tensor) pairs of a source, checked to be that."""
    if isinstance(source, torch.nn.Module):
        source = source.state_dict()
    if isinstance(source, Mapping):
        source = source.items()
    if not isinstance(source, Iterable) or isinstance(source, torch.Tensor | np.ndarray | str):
        raise UsageError(
            f"weights must be a module, a mapping or (name, tensor) pairs, got {type(source)}"
        )
    for item in source:
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
            raise UsageError(f"weights must come as (name, tensor) pairs, got {type(item)}")
        name, tensor = item
        if not isinstance(tensor, torch.Tensor | np.ndarray):
            raise UsageError(f"{name!r} is not a tensor but {type(tensor)}")
        yield name, tensor


def _check_plain(name: str, tensor: Any) -> None:
    """Raise UsageError unless the tensor holds its own strided data."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{name!r} is not a tensor but {type(tensor)}")
    kinds = {kind.__name__ for kind in type(tensor).__mro__}
    if kinds & {"DTensor", "ShardedTensor"}:
        raise UsageError(
            f"tensor {name!r} is sharded over ranks ({type(tensor).__name__}): gather it first, "
            "for example with full_tensor() or a full state dict"
        )
    if tensor.device.type == "meta":
        raise UsageError(f"tensor {name!r} is on the meta device: it has no data")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise UsageError(f"tensor {name!r} is not a plain strided tensor ({tensor.layout})")
    if hasattr(type(tensor), "__tensor_flatten__"):
        raise UsageError(
            f"tensor {name!r} is a {type(tensor).__name__}, which wraps others: publish those"
        )
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise UsageError(f"tensor {name!r} has no data: its storage was freed, as FSDP does")


def _identity(tensor: Any) -> object:
    """What two names of the same live tensor have in common; None if it has no memory."""
    if isinstance(tensor, np.ndarray):
        if tensor.size == 0:
            return None
        return (tensor.ctypes.data, tensor.dtype, tensor.shape, tensor.strides)
    if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    if hasattr(type(tensor), "__tensor_flatten__") or not tensor.untyped_storage().nbytes():
        return None
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
