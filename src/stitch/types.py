"""The words of the domain: runs, versions, schemas, constraints. Standard library only."""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from stitch.errors import ConstraintError, SchemaMismatchError, UsageError

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
BLOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
MAX_VERSION = 99_999_999
"""Versions are written with eight digits on the board."""


def check_run_name(run: str) -> str:
    """Return `run`, or raise UsageError: run names become path segments on the board."""
    if not isinstance(run, str) or not RUN_NAME.fullmatch(run) or run == "epochs":
        raise UsageError(
            f"run name {run!r} is not allowed: use 1 to 128 letters, digits, '.', '_' or '-', "
            "starting with a letter or digit ('epochs' is reserved)"
        )
    return run


_HTTP_ADDRESS = re.compile(
    r"https?://(?:[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?|\[[0-9A-Fa-f:.]{2,45}\])"
    r"(?::(?P<port>[0-9]{1,5}))?(?:/[!-~]*)?"
)
MAX_ADDRESS = 2000


def is_http_address(text: str) -> bool:
    """Whether `text` is a plain http(s) address: ASCII, without credentials, query or fragment."""
    found = _HTTP_ADDRESS.fullmatch(text) if len(text) <= MAX_ADDRESS else None
    return (
        found is not None
        and not set("?#") & set(text)
        and int(found["port"] or 80) in range(1, 65536)
    )


def check_version(version: int, what: str = "version") -> int:
    """Return `version`, or raise UsageError unless it is an int in 0..MAX_VERSION."""
    if isinstance(version, bool) or not isinstance(version, int):
        raise UsageError(f"{what} must be an integer, got {version!r}")
    if not 0 <= version <= MAX_VERSION:
        raise UsageError(f"{what} must be in 0..{MAX_VERSION}, got {version}")
    return version


@dataclass(frozen=True, order=True)
class VersionRef:
    """One version of one run. Version 0 is the run's base."""

    run: str
    version: int

    def __post_init__(self) -> None:
        check_run_name(self.run)
        check_version(self.version)

    def __str__(self) -> str:
        return f"{self.run}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> VersionRef:
        """From `run@version`; UsageError for anything else."""
        run, mark, number = text.rpartition("@")
        if not mark or not re.fullmatch(r"0|[1-9][0-9]{0,7}", number):
            raise UsageError(f"a version of a run is written RUN@VERSION, got {text!r:.200}")
        return cls(run, int(number))


DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one logical element, by safetensors dtype name."""

FLOAT_DTYPES = frozenset(
    {"F64", "F32", "F16", "BF16", "F8_E5M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
)
"""Dtypes whose words are sign and magnitude, so that ULP steps are taken on an ordered integer."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor as it is served.

    `dtype` is the safetensors name. A dtype that is not in DTYPE_BITS is carried as opaque bytes.
    An element in Stitch's sense is a storage *word* (`word_bytes` wide): sub-byte and unknown
    dtypes have one-byte words, all others one word per logical element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, name: str, dtype: str, shape: Iterable[int]) -> TensorSpec:
        """Spec of a known dtype; the byte count follows from the shape."""
        dims = tuple(shape)
        bits = DTYPE_BITS[dtype]
        count = 1
        for dim in dims:
            count *= dim
        if count * bits % 8:
            raise SchemaMismatchError(f"tensor {name!r}: {dtype} {dims} does not fill whole bytes")
        return cls(name, dtype, dims, count * bits // 8)

    @cached_property
    def word_bytes(self) -> int:
        """Bytes of a storage word: 1, 2, 4 or 8."""
        return max(1, DTYPE_BITS.get(self.dtype, 8) // 8)

    @cached_property
    def num_words(self) -> int:
        return self.num_bytes // self.word_bytes

    def to_json(self) -> list[object]:
        return [self.name, self.dtype, list(self.shape), self.num_bytes]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Schema:
    """The tensors of a view, sorted by name. Patches refer to tensors by their index here."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        if names != sorted(set(names)):
            raise SchemaMismatchError("a schema's tensors must be sorted by name, without repeats")

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec]) -> Schema:
        return cls(tuple(sorted(tensors, key=lambda t: t.name)))

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Tensor name -> index."""
        return {t.name: i for i, t in enumerate(self.tensors)}

    def __getitem__(self, name: str) -> TensorSpec:
        return self.tensors[self.index[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.index

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def num_bytes(self) -> int:
        return sum(t.num_bytes for t in self.tensors)

    @cached_property
    def num_elements(self) -> int:
        """Storage words over all tensors."""
        return sum(t.num_words for t in self.tensors)

    def to_json_bytes(self) -> bytes:
        """The canonical encoding: `[[name, dtype, shape, num_bytes], ...]`, compact ASCII JSON."""
        rows = [t.to_json() for t in self.tensors]
        return json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode("ascii")

    @cached_property
    def digest(self) -> str:
        """First 32 hex digits of the SHA-256 of the canonical encoding."""
        return hashlib.sha256(self.to_json_bytes()).hexdigest()[:32]


class ReplicaState(enum.StrEnum):
    """Life of a replica; see docs/protocol.md."""

    BOOTING = "BOOTING"
    VERIFYING = "VERIFYING"
    CATCHING_UP = "CATCHING_UP"
    SERVING = "SERVING"
    FETCHING = "FETCHING"
    STAGING = "STAGING"
    COMMITTING = "COMMITTING"
    ERROR = "ERROR"
    FAILED = "FAILED"


class NotReadyReason(enum.StrEnum):
    """Why a request's weight-version constraint is not met."""

    BEHIND = "behind"
    AHEAD = "ahead"
    GAP = "gap"
    BOOTING = "booting"
    OTHER_RUN = "other_run"


@dataclass(frozen=True)
class VersionConstraint:
    """What a request demands of the weights that answer it: at most one of the versions, of `run`
    if that is set, else of whichever run is served."""

    min_version: int | None = None
    exact_version: int | None = None
    run: str | None = None

    @classmethod
    def parse(cls, value: object) -> VersionConstraint:
        """From the JSON value of `weight_version`: `{"min_version": 7}`, `{"exact_version": 7}`,
        `{"run": "math"}`, or a version with its run.

        Raises ConstraintError for anything but one canonical non-negative integer and a run name.
        """
        if not isinstance(value, dict) or not value:
            raise ConstraintError(
                'weight_version must be {"min_version": N} or {"exact_version": N}, with or '
                f'without a "run", got {json.dumps(value)[:200]}'
            )
        for key, number in value.items():
            if key == "run":
                continue
            if key not in ("min_version", "exact_version"):
                raise ConstraintError(f"weight_version has unknown key {str(key)[:100]!r}")
            if isinstance(number, bool) or not isinstance(number, int):
                raise ConstraintError(
                    f"weight_version.{key} must be an integer, got {number!r:.100}"
                )
            if not 0 <= number <= MAX_VERSION:
                raise ConstraintError(f"weight_version.{key} must be in 0..{MAX_VERSION}")
        if "min_version" in value and "exact_version" in value:
            raise ConstraintError("weight_version takes min_version or exact_version, not both")
        if "run" in value:
            _check_wanted_run(value["run"], "weight_version.run")
        return cls(**value)

    @classmethod
    def parse_headers(
        cls, minimum: str | None, exact: str | None, run: str | None = None
    ) -> VersionConstraint:
        """From X-Stitch-Min-Version and X-Stitch-Exact-Version (canonical decimal digits), and
        X-Stitch-Run."""
        if run is not None:
            _check_wanted_run(run, "X-Stitch-Run")
        if minimum is not None and exact is not None:
            raise ConstraintError(
                "X-Stitch-Min-Version and X-Stitch-Exact-Version exclude each other"
            )
        for key, text in (("min_version", minimum), ("exact_version", exact)):
            if text is not None:
                if not re.fullmatch(r"0|[1-9][0-9]{0,7}", text):
                    raise ConstraintError(
                        f"header for {key} is not a version number: {text[:40]!r}"
                    )
                return cls(**{key: int(text)}, run=run)
        return cls(run=run)

    @property
    def target(self) -> int | None:
        return self.exact_version if self.exact_version is not None else self.min_version

    def unmet_by(self, applied: int | None, run: str | None = None) -> NotReadyReason | None:
        """Why a replica serving `applied` (None: nothing yet) of `run` (None: not known which) may
        not answer, or None if it may."""
        if self.target is None and self.run is None:
            return None
        if applied is None:
            return NotReadyReason.BOOTING
        if self.run is not None and run is not None and self.run != run:
            return NotReadyReason.OTHER_RUN
        if self.target is None:
            return None
        if applied < self.target:
            return NotReadyReason.BEHIND
        if self.exact_version is not None and applied > self.exact_version:
            return NotReadyReason.AHEAD
        return None


def _check_wanted_run(run: object, where: str) -> None:
    if not isinstance(run, str) or not RUN_NAME.fullmatch(run):
        raise ConstraintError(f"{where} is not the name of a run: {run!r:.100}")


@dataclass(frozen=True)
class VersionSpan:
    """Output tokens `start` (inclusive) to `end` (exclusive) came from `version`."""

    version: int
    start: int
    end: int

    def to_json(self) -> dict[str, int]:
        return {"version": self.version, "start": self.start, "end": self.end}


@dataclass(frozen=True)
class PatchStats:
    """What a patch changes and costs. Elements are storage words."""

    num_elements: int
    num_changed: int
    num_bytes: int
    encodings: Mapping[str, int] = field(default_factory=dict)
    """Encoding name -> number of buckets, 'absent' included."""

    @property
    def density(self) -> float:
        return self.num_changed / self.num_elements if self.num_elements else 0.0

    @property
    def bits_per_changed_element(self) -> float | None:
        return 8 * self.num_bytes / self.num_changed if self.num_changed else None
