"""Running a loader with its writes caught: copies into live tensors become blocks, none happens.

A dispatch mode sees every operation of its thread. Writes run only on memory made inside the mode;
those to any other memory are noted instead. Threads that the loader starts, directly or through an
executor, would escape a mode, so they are made to run under it.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stitch.engines.placement.blocks import Block, UnmappableError, blocks_of_copy
from stitch.engines.placement.live import LiveTensors, storage_id

_aten = torch.ops.aten
_CONSTANT_WRITES = frozenset(
    {_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zeros_like.out}
)


@dataclass(frozen=True)
class Fill:
    """A constant write to live memory, as loaders make to padding.

    `after` is the number of blocks recorded before it.
    """

    block: Block
    after: int


@dataclass(frozen=True)
class Write:
    """A write that no block explains.

    key: the live storage; None for other memory, which is then `target`. names: checkpoint tensors
    whose values go into it; keys: live storages whose values do.
    """

    op: str
    key: str | None
    names: frozenset[str]
    keys: frozenset[str]
    target: torch.Tensor | None = None
    reason: str = ""


@dataclass(eq=False)
class Notes:
    """What a run of a loader did."""

    blocks: list[tuple[str, Block]] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    """Names of which a value was read into Python, so it may go anywhere."""


class Sandbox(TorchDispatchMode):  # type: ignore[misc]
    """Enter it around a loader. `source` registers a checkpoint tensor given to the loader."""

    def __init__(self, live: LiveTensors, stand_ins: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.notes = Notes()
        self._live = live
        self._keys = {storage_id(flat): key for key, flat in stand_ins.items()}
        self._sources: dict[int, tuple[str, torch.dtype]] = {}
        self._alive: list[torch.Tensor] = list(stand_ins.values())
        self._fresh: set[int] = set()
        self._taint: dict[int, frozenset[tuple[str, str]]] = {}
        self._lock = threading.RLock()

    def source(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        with self._lock:
            ident = storage_id(tensor)
            self._sources[ident] = (name, tensor.dtype)
            self._fresh.discard(ident)
            self._taint.pop(ident, None)
            self._alive.append(tensor)
        return tensor

    def origins(self, tensor: torch.Tensor) -> frozenset[tuple[str, str]]:
        """("name" or "key", which) of everything whose values are in a tensor's memory."""
        ident = storage_id(tensor)
        if ident in self._sources:
            return frozenset({("name", self._sources[ident][0])})
        key = self._key_of(tensor)
        if key is not None:
            return frozenset({("key", key)})
        return self._taint.get(ident, frozenset())

    def _key_of(self, tensor: torch.Tensor) -> str | None:
        return self._keys.get(storage_id(tensor)) or self._live.key_of(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with self._lock:
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is _aten.copy_.default and self._copied(args[0], args[1]):
            return args[0]
        if func is _aten._foreach_copy_.default:
            for target, value in zip(args[0], args[1], strict=True):
                target.copy_(value)
            return None
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        origins = frozenset[tuple[str, str]]().union(*map(self.origins, tensors))
        written = _written(func, args, kwargs)
        caught = [tensor for tensor in written if storage_id(tensor) not in self._fresh]
        if caught:
            for tensor in caught:
                self._caught(func, tensor, origins, args)
            return written[0]
        for tensor in written:
            self._mark(tensor, origins)
        out = func(*args, **kwargs)
        self._returned(out, {storage_id(tensor) for tensor in tensors}, origins)
        return out

    def _copied(self, target: torch.Tensor, value: torch.Tensor) -> bool:
        """Note a copy straight from a checkpoint tensor into live memory."""
        key, ident = self._key_of(target), storage_id(value)
        if key is None or ident not in self._sources:
            return False
        name, stored = self._sources[ident]
        wide = value.expand(target.shape)
        reason = _refusal(stored, value.dtype, target.dtype, self._live[key].flat.dtype)
        if not reason:
            try:
                blocks = blocks_of_copy(
                    key,
                    target.shape,
                    (wide.storage_offset(), wide.stride()),
                    (target.storage_offset(), target.stride()),
                    widen=value.dtype != target.dtype,
                )
            except UnmappableError as error:
                reason = str(error)
            else:
                self.notes.blocks.extend((name, block) for block in blocks)
                return True
        self.notes.writes.append(Write("copy_", key, frozenset({name}), frozenset(), reason=reason))
        return True

    def _caught(
        self,
        func: Any,
        target: torch.Tensor,
        origins: frozenset[tuple[str, str]],
        args: Sequence[Any],
    ) -> None:
        key = self._key_of(target)
        names = frozenset(which for kind, which in origins if kind == "name")
        keys = frozenset(which for kind, which in origins if kind == "key")
        if key is not None and func in _CONSTANT_WRITES and not names and keys <= {key}:
            place = (target.storage_offset(), target.stride())
            try:
                for block in blocks_of_copy(key, target.shape, (0, _row_major(target)), place):
                    self.notes.fills.append(Fill(block, len(self.notes.blocks)))
                return
            except UnmappableError:
                pass
        if key is None and not names and not keys:
            return
        self.notes.writes.append(
            Write(str(func), key, names, keys, target=None if key is not None else target)
        )

    def _mark(self, tensor: torch.Tensor, origins: frozenset[tuple[str, str]]) -> None:
        ident = storage_id(tensor)
        if origins:
            self._taint[ident] = self._taint.get(ident, frozenset()) | origins

    def _returned(self, out: Any, known: set[int], origins: frozenset[tuple[str, str]]) -> None:
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                ident = storage_id(leaf)
                if ident not in known:
                    self._fresh.add(ident)
                    self._taint.pop(ident, None)
                    self._mark(leaf, origins)
            elif isinstance(leaf, bool | int | float) and origins:
                self.notes.read |= {which for kind, which in origins if kind == "name"}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enter the mode, without gradients, and take along threads that are started in it."""
        with torch.no_grad(), _threads.under(self), self:
            yield


def _refusal(
    stored: torch.dtype, given: torch.dtype, target: torch.dtype, live: torch.dtype
) -> str:
    """Why a copy between these dtypes cannot be followed by words; empty if it can."""
    if given.itemsize != stored.itemsize:
        return f"it is copied as {given}, of another width than {stored}"
    if target.itemsize != live.itemsize:
        return f"it goes into memory that is used as {live} and as {target}"
    if given == target or (given, target) == (torch.bfloat16, torch.float32):
        return ""
    return f"the engine keeps it as {target}, which does not hold all words of {given}"


def _row_major(tensor: torch.Tensor) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for n in reversed(tensor.shape):
        strides.insert(0, step)
        step *= n
    return tuple(strides)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to, by its schema."""
    if not func._schema.is_mutable:
        return []
    values = list(zip(func._schema.arguments, args, strict=False))
    values += [(arg, kwargs[arg.name]) for arg in func._schema.arguments if arg.name in kwargs]
    written: list[torch.Tensor] = []
    for arg, value in values:
        if arg.alias_info is not None and arg.alias_info.is_write:
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written


class _Threads:
    """Takes along the threads that work in a sandbox starts. For all sandboxes of the process.

    Two functions of the standard library are replaced while any sandbox is entered, and put back
    after the last one, in whatever order they are left; each thread has its own sandbox, or none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._here = threading.local()
        self._submit: Any = None
        self._start: Any = None

    @contextmanager
    def under(self, mode: Sandbox) -> Iterator[None]:
        """Until the end, work that this thread hands to others runs under the mode.

        Executors run it at once, in this thread; a new thread enters the mode itself.
        """
        before = getattr(self._here, "mode", None)
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._replace()
        self._here.mode = mode
        try:
            yield
        finally:
            self._here.mode = before
            with self._lock:
                self._entered -= 1
                if not self._entered:
                    concurrent.futures.ThreadPoolExecutor.submit = self._submit  # type: ignore[method-assign]
                    threading.Thread.start = self._start  # type: ignore[method-assign]

    def _replace(self) -> None:
        here, under = self._here, self.under
        submit = self._submit = concurrent.futures.ThreadPoolExecutor.submit
        start = self._start = threading.Thread.start

        def submit_here(
            pool: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> concurrent.futures.Future[Any]:
            if getattr(here, "mode", None) is None:
                return submit(pool, fn, *args, **kwargs)
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
            return future

        def start_under(thread: threading.Thread) -> None:
            mode = getattr(here, "mode", None)
            if mode is not None:
                run = thread.run

                def run_under() -> None:
                    with torch.no_grad(), under(mode), mode:
                        run()

                thread.run = run_under  # type: ignore[method-assign]
            start(thread)

        concurrent.futures.ThreadPoolExecutor.submit = submit_here  # type: ignore[method-assign]
        threading.Thread.start = start_under  # type: ignore[method-assign,assignment]


_threads = _Threads()
