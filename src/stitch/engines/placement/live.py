"""A model's live storages as flat words, other tensors that it holds, and stand-ins for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from stitch.tensors.torch_state import BITS, DTYPE_NAMES

_DEPTH = 3
"""Steps from a module's attribute to a tensor that are followed."""
_FOREIGN = frozenset(
    {"torch", "numpy", "builtins", "collections", "threading", "typing", "logging"}
)


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors of one storage, as long as that is alive."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(eq=False)
class Storage:
    """One storage. Its addresses never change while an engine runs.

    flat: (n,) the whole of it in the dtype of the first tensor found there; words: its bits.
    tensors: every tensor object that was found to live there.
    """

    key: str
    flat: torch.Tensor
    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.words = self.flat.view(BITS[self.flat.element_size()])
        self.dtype = DTYPE_NAMES.get(self.flat.dtype, "")

    @property
    def num_bytes(self) -> int:
        return int(self.flat.numel() * self.flat.element_size())


class LiveTensors:
    """Storages of all parameters and buffers, keyed by their first name.

    `adopt` adds others, such as copies that an engine derives from its weights.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.storages: dict[str, Storage] = {}
        self._by_id: dict[int, Storage] = {}
        named = itertools.chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        for name, tensor in named:
            self.adopt(name, tensor)

    def adopt(self, name: str, tensor: torch.Tensor) -> Storage | None:
        """Add a tensor; None if it has no plain storage."""
        if not is_plain(tensor):
            return None
        storage = self._by_id.get(storage_id(tensor))
        if storage is None:
            storage = Storage(name, _whole(tensor))
            self.storages[name] = self._by_id[storage_id(tensor)] = storage
        storage.names.append(name)
        if not any(tensor is known for known in storage.tensors):
            storage.tensors.append(tensor)
        return storage

    def __getitem__(self, key: str) -> Storage:
        return self.storages[key]

    def key_of(self, tensor: torch.Tensor) -> str | None:
        """The key of the storage that a tensor lives in, if it is one of these."""
        storage = self._by_id.get(storage_id(tensor))
        return None if storage is None else storage.key

    def __iter__(self) -> Iterator[Storage]:
        return iter(self.storages.values())

    @property
    def num_bytes(self) -> int:
        return sum(storage.num_bytes for storage in self)

    def sums(self) -> dict[str, int]:
        """A cheap fingerprint of every storage: the sum of its words of 64 bits (or less)."""
        return {storage.key: fingerprint(storage.flat) for storage in self}


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own that can be seen as words."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        return False
    if hasattr(type(tensor), "__tensor_flatten__") or tensor.is_complex():
        return False
    return bool(tensor.numel()) and bool(tensor.untyped_storage().nbytes())


def fingerprint(flat: torch.Tensor) -> int:
    """A wrapping sum of a flat, contiguous tensor's bits."""
    if not flat.numel():
        return 0
    octets = flat.view(torch.uint8)
    whole = octets.numel() // 8 * 8
    total = int(octets[whole:].long().sum()) if whole < octets.numel() else 0
    return total + int(octets[:whole].view(torch.int64).sum()) if whole else total


def attribute_tensors(model: torch.nn.Module, live: LiveTensors) -> dict[str, torch.Tensor]:
    """Path -> tensor, for plain tensors outside `live` that modules or their helpers hold.

    Not caches of keys and values: they are large, and no weights.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules") and "cache" not in name:
                for path, tensor in _tensors_in(f"{prefix}.{name}", value, _DEPTH, seen):
                    if is_plain(tensor) and live.key_of(tensor) is None:
                        found.setdefault(path.lstrip("."), tensor)
    return found


def _tensors_in(
    path: str, value: Any, depth: int, seen: set[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth == 0 or isinstance(value, torch.nn.Module | str | bytes | int | float | type(None)):
        return
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inside = list(value.items())
    elif isinstance(value, list | tuple | set):
        inside = enumerate(value)
    elif hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in _FOREIGN:
        if id(value) in seen or (callable(value) and not isinstance(value, object)):
            return
        seen.add(id(value))
        inside = list(vars(value).items())
    for name, item in inside:
        if "cache" in str(name):
            continue
        yield from _tensors_in(f"{path}.{name}", item, depth - 1, seen)


class StandIns:
    """While entered, the tensors of `live` have other memory; the real one cannot be written.

    Each storage gets one of the same layout on the CPU: of its own dtype or of `dtype`, zeroed or
    untouched (then it costs address space only). `rebound` lists, after the end, names of tensors
    to which something else was given meanwhile; they have their own memory again too.
    """

    def __init__(
        self, live: LiveTensors, *, dtype: torch.dtype | None = None, zero: bool = False
    ) -> None:
        self._live = live
        self._dtype = dtype
        self._make = torch.zeros if zero else torch.empty
        self._saved: list[tuple[str, torch.Tensor, torch.Tensor, bool, int]] = []
        self.flats: dict[str, torch.Tensor] = {}
        self.rebound: list[tuple[str, torch.Tensor]] = []

    def __enter__(self) -> StandIns:
        try:
            for storage in self._live:
                self._replace(storage)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _replace(self, storage: Storage) -> None:
        dtype = self._dtype or storage.flat.dtype
        flat = self._make(storage.flat.numel(), dtype=dtype, device="cpu")
        self.flats[storage.key] = flat
        for tensor in storage.tensors:
            if tensor.element_size() != storage.flat.element_size():
                raise UnusualStorageError(f"{storage.key}: tensors of several widths share memory")
            self._saved.append(
                (storage.key, tensor, tensor.data, tensor.requires_grad, storage_id(flat))
            )
            if tensor.is_leaf:
                tensor.requires_grad_(False)
            tensor.data = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _restore(self) -> None:
        for key, tensor, data, needs_grad, stand_in in reversed(self._saved):
            if storage_id(tensor) != stand_in:
                self.rebound.append((key, tensor.data))
            tensor.data = data
            if needs_grad:
                tensor.requires_grad_(True)
        self._saved.clear()


class UnusualStorageError(ValueError):
    """Memory that is used in a way that stand-ins cannot take."""


class ModuleGuard:
    """Puts attributes, parameters and buffers of all modules back as they were.

    A loader may set flags or replace tensors; when nothing was loaded for real, none of that may
    stay. Changes inside lists, dicts and helper objects are not seen.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._before = [
            (path, table, dict(table))
            for path, module in model.named_modules()
            for table in (module.__dict__, module._parameters, module._buffers, module._modules)
        ]

    def restore(self) -> dict[str, tuple[Any, Any]]:
        """Undo all changes; returns path -> (value before, value that was found)."""
        changed: dict[str, tuple[Any, Any]] = {}
        for path, table, before in self._before:
            for name in table.keys() | before.keys():
                old, new = before.get(name), table.get(name)
                if old is new and (name in table) == (name in before):
                    continue
                changed[f"{path}.{name}".lstrip(".")] = (old, new)
                if name in before:
                    table[name] = old
                else:
                    del table[name]
        return changed


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage as a flat tensor of its dtype."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(storage, 0, (count,), (1,))
