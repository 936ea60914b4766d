"""A board: its runs and epochs, and how one is opened."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from stitch.board import keys
from stitch.board.epochs import Epochs
from stitch.board.log import Run
from stitch.board.schemas import pack_schema
from stitch.board.stores.addresses import parse_address
from stitch.board.stores.cloud import cloud_store
from stitch.board.stores.creation import (
    MAX_RECORD_BYTES,
    Patience,
    create_record,
)
from stitch.board.stores.directory import open_directory
from stitch.board.stores.probe import probe_create_if_absent
from stitch.board.stores.signed_store import SignedStore, Signing, as_signing, claimed_signer
from stitch.board.stores.signing import Signer, TrustedKeys
from stitch.board.stores.store import ObjectStore, memory_store
from stitch.board.transfers import blobs
from stitch.board.transfers.cache import BlobCache
from stitch.board.transfers.caching_store import CachingStore
from stitch.errors import CorruptRecordError, RunExistsError, RunNotFoundError, UsageError
from stitch.records import BlobRef, EpochRecord, RunRecord
from stitch.types import Schema, check_run_name


class Board:
    """The runs and epochs in one object store. Thread-safe."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        patience: Patience | None = None,
        sweep: Callable[[float], int] = lambda older_than_s: 0,
        cache: BlobCache | None = None,
        signing: Signing | None = None,
    ) -> None:
        self.signed = None if signing is None else SignedStore(store, signing)
        store = store if self.signed is None else self.signed
        store = store if cache is None else CachingStore(store, cache)
        self.store = store
        self.patience = patience or Patience()
        self._sweep = sweep
        self._epochs = Epochs(store, self.patience)
        self._checked = False
        self._check_lock = threading.Lock()

    @property
    def url(self) -> str:
        return self.store.url

    def __repr__(self) -> str:
        return f"Board({self.url!r})"

    def signed_by(self, key: str) -> str | None:
        """Id of the key that signed the record at `key`, None if it is not signed.

        Checked, with UntrustedRecordError, if this board was opened with trusted keys; otherwise
        only what the record says.
        """
        if self.signed is not None:
            return self.signed.signed_by(key, max_bytes=MAX_RECORD_BYTES)
        data = self.store.get(key, max_bytes=MAX_RECORD_BYTES)
        return None if data is None else claimed_signer(key, data)

    @property
    def signers(self) -> list[str] | None:
        """Ids of the keys whose signatures were met so far; None if none are checked."""
        return None if self.signed is None else self.signed.signers

    def runs(self) -> list[str]:
        """Names of all runs, sorted. Folders without a `run.json` are not runs."""
        names = [name for name in self.store.list_folders("") if keys.is_run_name(name)]
        return [name for name in names if self.store.head(keys.run_record(name)) is not None]

    def create_run(self, record: RunRecord, schema: Schema) -> Run:
        """Create the run that `record` describes; its assets must have been put before.

        Raises RunExistsError if the name is taken, and StoreUnsuitableError if the store does not
        keep create-if-absent.
        """
        if schema.digest != record.schema_digest:
            raise UsageError(
                f"run {record.run!r}: the record names schema {record.schema_digest}, "
                f"but the schema's digest is {schema.digest}"
            )
        key = keys.run_record(record.run)
        data = record.to_json_bytes()
        RunRecord.parse(data, key)
        self.check_store()
        for ref in record.assets:
            asset_key = keys.asset(record.run, ref.name, ref.blake3)
            blobs.require_blob(self.store, asset_key, ref, self.patience)
        schema_key = keys.schema(record.run, schema.digest)
        self.store.put(schema_key, pack_schema(schema), mode="create")
        found = create_record(self.store, key, data, self.patience)
        if found is not None:
            raise RunExistsError(f"{key}: the board already has run {_who_made(found, key)}")
        return Run(self, record)

    def open_run(self, name: str) -> Run:
        """The run `name`. RunNotFoundError lists runs with similar names."""
        key = keys.run_record(check_run_name(name))
        data = self.store.get(key, max_bytes=MAX_RECORD_BYTES)
        if data is None:
            raise RunNotFoundError(f"board {self.url} has no run {name!r}: {self._near(name)}")
        record = RunRecord.parse(data, key)
        if record.run != name:
            raise CorruptRecordError(f"{key}: field run is {record.run!r}, wanted {name!r}")
        return Run(self, record)

    def _near(self, name: str) -> str:
        names = self.runs()
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:10]
        return f"it has {', '.join(near)}" if near else "it has no runs at all"

    def put_asset(self, run: str, name: str, data: bytes) -> BlobRef:
        """Store a small file that belongs to the run's checkpoints, before or after create_run."""
        ref = blobs.ref_of(name, data)
        key = keys.asset(run, name, ref.blake3)
        return blobs.put_blob(self.store, key, name, data, self.patience)

    def current_epoch(self, after: int = 0) -> EpochRecord | None:
        """The highest epoch, None if none began; one request while `after` is the highest."""
        return self._epochs.current(after)

    def begin_epoch(self, run: str, writer: str) -> EpochRecord:
        """Begin the next epoch: `writer` publishes now, and `run` is the board's current run."""
        self.check_store()
        return self._epochs.begin(run, writer)

    def end_epoch(self, epoch: EpochRecord) -> None:
        """Say that nothing of `epoch` will be published any more, which spares the next publisher
        a fence. Only its own publisher may, once no commit of it is under way or in doubt."""
        self._epochs.end(epoch)

    def is_fenced(self, epoch: EpochRecord, published: int) -> bool:
        """Whether it is sure that no publisher of an earlier epoch can still publish into the run,
        whose newest version is of epoch `published` (0: there is none).

        One that sleeps between its look at the epochs and its commit would wake up and commit.
        """
        return self._epochs.is_over(epoch.run, epoch.epoch, published)

    def check_store(self) -> None:
        """Once per board: StoreUnsuitableError unless the store keeps create-if-absent."""
        with self._check_lock:
            if not self._checked:
                probe_create_if_absent(self.store, self.patience)
                self._checked = True

    def sweep_temporaries(self, older_than_s: float = 3600.0) -> int:
        """Delete what killed writers left in a directory store; how many files that were."""
        return self._sweep(older_than_s)


def _who_made(data: bytes, key: str) -> str:
    record = RunRecord.parse(data, key)
    return f"{record.run!r}, created by {record.writer} from {record.base}"


def open_board(
    where: str | Path,
    *,
    create: bool = True,
    patience: Patience | None = None,
    cache: BlobCache | None = None,
    signing_key: Signer | Path | None = None,
    trusted_keys: TrustedKeys | Sequence[Path] | None = None,
) -> Board:
    """Open the board at an address: a directory, `file://`, `memory://NAME`, `s3://`, `gs://` or
    `az://` (see `stitch.board.stores.addresses` for their forms and options).

    A missing directory is made if `create` is set, else StoreUnsuitableError. Boards of one
    memory name share their content within the process. Clouds are not asked anything yet. Blobs
    are read over `cache`, if one is given. Records that are written are signed with `signing_key`;
    with `trusted_keys` none is read that was not signed by one of them (UntrustedRecordError).
    """
    signing = as_signing(signing_key, trusted_keys)
    if isinstance(where, Path):
        root: Path | None = where
    else:
        address = parse_address(where)
        root = Path(address.bucket) if address.scheme == "file" else None
    if root is not None:
        directory = open_directory(root.expanduser().absolute(), create=create)
        sweep = directory.sweep_temporaries
        return Board(directory, patience=patience, sweep=sweep, cache=cache, signing=signing)
    is_memory = address.scheme == "memory"
    store = memory_store(address.bucket) if is_memory else cloud_store(address)
    return Board(store, patience=patience, cache=cache, signing=signing)
