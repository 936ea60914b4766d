"""Signed records: who is believed, what is refused, and that private keys stay private."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from board_kit import NO_WAITS, digest, manifest, new_run
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from stitch.board import Board, Run, keys, open_board
from stitch.board.copying import BoardCopier
from stitch.board.stores.directory import open_directory
from stitch.board.stores.signed_store import Signing, sign_record
from stitch.board.stores.signing import Signer, TrustedKeys, generate
from stitch.board.stores.store import ObjectStore
from stitch.errors import (
    CorruptRecordError,
    PublishConflictError,
    UntrustedRecordError,
    UsageError,
)
from stitch.strict_json import canonical_json
from stitch.testing.faults import FaultyStore


@dataclass
class Keys:
    """Two key pairs on disk."""

    folder: Path

    def __post_init__(self) -> None:
        self.signers = {
            name: generate(self.folder / name, self.folder / f"{name}.pub") for name in "ab"
        }

    def trust(self, *names: str) -> TrustedKeys:
        return TrustedKeys.load([self.folder / f"{name}.pub" for name in names])


@pytest.fixture
def pairs(tmp_path: Path) -> Keys:
    folder = tmp_path / "keys"
    folder.mkdir()
    return Keys(folder)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_directory(tmp_path / "board", create=True)


def board_on(
    store: ObjectStore, signer: Signer | None = None, trusted: TrustedKeys | None = None
) -> Board:
    return Board(store, patience=NO_WAITS, signing=Signing(signer, trusted))


def publish(run: Run, version: int) -> None:
    ref = run.put_blob(version, f"w-{version}-{os.urandom(4).hex()}.patch", b"patch")
    run.commit(manifest(run, version, (ref,)))


def raw(store: ObjectStore, key: str) -> dict[str, Any]:
    data = store.get(key, max_bytes=2**20)
    assert data is not None
    return json.loads(data)  # type: ignore[no-any-return]


def put(store: ObjectStore, key: str, record: dict[str, Any]) -> None:
    store.put(key, canonical_json(record), mode="overwrite")


def signed_run(store: ObjectStore, pairs: Keys, versions: int = 2) -> Run:
    run = new_run(board_on(store, pairs.signers["a"], pairs.trust("a")))
    for version in range(1, versions + 1):
        publish(run, version)
    return run


def reader(store: ObjectStore, pairs: Keys, *names: str) -> Board:
    return board_on(store, trusted=pairs.trust(*names))


def test_what_a_trusted_key_signed_is_read(store: ObjectStore, pairs: Keys) -> None:
    signed_run(store, pairs)
    board = reader(store, pairs, "a")
    run = board.open_run("math")
    assert (run.newest(), run.refusal) == (2, None)
    assert [m.version for m in run.manifests(1, 3)] == [1, 2]
    assert run.digest(2) == digest(2)
    assert board.signers == [pairs.signers["a"].key_id]
    assert board.signed_by(keys.manifest("math", 1)) == pairs.signers["a"].key_id


def test_readers_without_trusted_keys_read_signed_boards(store: ObjectStore, pairs: Keys) -> None:
    signed_run(store, pairs)
    board = Board(store, patience=NO_WAITS)
    assert board.open_run("math").newest() == 2
    assert board.signers is None
    assert board.signed_by(keys.manifest("math", 1)) == pairs.signers["a"].key_id


def test_copies_keep_their_signatures(store: ObjectStore, pairs: Keys, tmp_path: Path) -> None:
    signed_run(store, pairs).board.begin_epoch("math", "w")
    there = open_directory(tmp_path / "copy", create=True)
    source, target = (Board(each, patience=NO_WAITS) for each in (store, there))
    BoardCopier(source, target, scratch=tmp_path).copy()
    board = reader(there, pairs, "a")
    assert board.open_run("math").newest() == 2
    assert board.current_epoch() == source.current_epoch()
    for signed in ((reader(store, pairs, "a"), target), (source, board)):
        with pytest.raises(UsageError, match="open both boards without keys"):
            BoardCopier(*signed)


def test_every_kind_of_trusted_record_is_signed(store: ObjectStore, pairs: Keys) -> None:
    board = board_on(store, pairs.signers["a"], pairs.trust("a"))
    new_run(board)
    epoch = board.begin_epoch("math", "w")
    board.end_epoch(epoch)
    for key in (keys.run_record("math"), keys.epoch(1), keys.epoch_end(1)):
        assert raw(store, key)["signature"]["key"] == pairs.signers["a"].key_id
    assert reader(store, pairs, "a").current_epoch() == epoch
    assert board_on(store, trusted=pairs.trust("b")).current_epoch() is None


@pytest.mark.parametrize("signer", ["b", None])
def test_a_run_by_somebody_else_is_refused(
    store: ObjectStore, pairs: Keys, signer: str | None
) -> None:
    new_run(board_on(store, pairs.signers[signer] if signer else None))
    with pytest.raises(UntrustedRecordError, match=r"math/run\.json") as caught:
        reader(store, pairs, "a").open_run("math")
    assert ("not signed" if signer is None else "is not trusted") in str(caught.value)


@pytest.mark.parametrize("signer", ["b", None])
def test_versions_by_somebody_else_are_none_and_no_blob_of_theirs_is_fetched(
    store: ObjectStore, pairs: Keys, signer: str | None
) -> None:
    signed_run(store, pairs)
    publish(board_on(store, pairs.signers[signer] if signer else None).open_run("math"), 3)
    counted = FaultyStore(store)
    run = reader(counted, pairs, "a").open_run("math")
    assert run.newest() == 2
    assert isinstance(run.refusal, UntrustedRecordError)
    assert "v/00000003/manifest.json" in str(run.refusal)
    with pytest.raises(UntrustedRecordError):
        run.manifest(3)
    assert not [key for _, key in counted.requests if key.endswith(".patch")]
    # Their number is taken: one who is trusted cannot publish it, and is told why.
    with pytest.raises(UntrustedRecordError, match="v/00000003"):
        publish(board_on(store, pairs.signers["a"], pairs.trust("a")).open_run("math"), 3)


def test_a_refusal_is_logged_once_and_ends_with_its_reason(
    store: ObjectStore, pairs: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    signed_run(store, pairs)
    publish(Board(store, patience=NO_WAITS).open_run("math"), 3)
    run = reader(store, pairs, "a").open_run("math")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert run.newest(2) == 2
    assert caplog.text.count("event=untrusted_manifest") == 1
    key = keys.manifest("math", 3)
    data = store.get(key, max_bytes=2**20)
    assert data is not None
    store.put(key, sign_record(key, data, pairs.signers["a"]), mode="overwrite")
    assert run.newest(2) == 3
    assert run.refusal is None


# --- forgeries ---------------------------------------------------------------------------------

KEY = keys.manifest("math", 2)


def forge_field(record: dict[str, Any]) -> None:
    record["digest_after"] = "0" * 32


def strip(record: dict[str, Any]) -> None:
    del record["signature"]


def add_field(record: dict[str, Any]) -> None:
    record["extra"] = 1


def other_value(record: dict[str, Any]) -> None:
    record["signature"]["value"] = "0" * 128


def other_algorithm(record: dict[str, Any]) -> None:
    record["signature"]["algorithm"] = "none"


def more_in_signature(record: dict[str, Any]) -> None:
    record["signature"]["note"] = "x"


def signature_null(record: dict[str, Any]) -> None:
    record["signature"] = None


def signature_list(record: dict[str, Any]) -> None:
    record["signature"] = [record["signature"]]


def short_value(record: dict[str, Any]) -> None:
    record["signature"]["value"] = record["signature"]["value"][:-2]


def upper_value(record: dict[str, Any]) -> None:
    record["signature"]["value"] = record["signature"]["value"].upper()


def key_of_another_type(record: dict[str, Any]) -> None:
    record["signature"]["key"] = 7


@pytest.mark.parametrize(
    "forge",
    [
        forge_field, strip, add_field, other_value, other_algorithm, more_in_signature,
        signature_null, signature_list, short_value, upper_value, key_of_another_type,
    ],
    ids=lambda forge: forge.__name__,
)  # fmt: skip
def test_an_altered_record_is_refused(store: ObjectStore, pairs: Keys, forge: Any) -> None:
    signed_run(store, pairs)
    record = raw(store, KEY)
    forge(record)
    put(store, KEY, record)
    run = reader(store, pairs, "a", "b").open_run("math")
    with pytest.raises(UntrustedRecordError, match="v/00000002"):
        run.manifest(2)
    assert run.newest() == 1


def test_the_same_record_in_other_bytes_is_refused(store: ObjectStore, pairs: Keys) -> None:
    signed_run(store, pairs)
    record = raw(store, KEY)
    for text in (json.dumps(record), json.dumps(record, indent=1), json.dumps(record) + "\n"):
        store.put(KEY, text.encode(), mode="overwrite")
        with pytest.raises(UntrustedRecordError, match="canonical"):
            reader(store, pairs, "a").open_run("math").manifest(2)


def test_a_repeated_signature_is_damage(store: ObjectStore, pairs: Keys) -> None:
    signed_run(store, pairs)
    data = store.get(KEY, max_bytes=2**20)
    assert data is not None
    store.put(KEY, data[:-1] + b',"signature":null}', mode="overwrite")
    with pytest.raises(CorruptRecordError, match="occurs twice"):
        reader(store, pairs, "a").open_run("math").manifest(2)


def test_a_record_of_another_version_run_or_kind_is_no_record_here(
    store: ObjectStore, pairs: Keys
) -> None:
    """The signature covers the key, so not even the fields need to give the replay away."""
    signed_run(store, pairs)
    new_run(board_on(store, pairs.signers["a"]), "other")
    board = reader(store, pairs, "a")
    first, run = keys.manifest("math", 1), keys.run_record("math")
    for source, target in (
        (first, keys.manifest("math", 3)),
        (first, keys.manifest("other", 1)),
        (run, keys.run_record("other")),
        (first, keys.anchor("math", 1)),
        (first, keys.merged("math", 0, 4)),
    ):
        data = store.get(source, max_bytes=2**20)
        assert data is not None
        store.put(target, data, mode="overwrite")
        with pytest.raises(UntrustedRecordError, match="taken"):
            board.store.get(target, max_bytes=2**20)


def test_a_signature_by_one_key_under_the_name_of_another_is_refused(
    store: ObjectStore, pairs: Keys
) -> None:
    signed_run(store, pairs)
    record = raw(store, KEY)
    del record["signature"]
    signed = json.loads(sign_record(KEY, canonical_json(record), pairs.signers["b"]))
    signed["signature"]["key"] = pairs.signers["a"].key_id
    put(store, KEY, signed)
    with pytest.raises(UntrustedRecordError, match="did not sign"):
        reader(store, pairs, "a", "b").open_run("math").manifest(2)


# --- rotation and writers ----------------------------------------------------------------------


def test_keys_are_rotated_by_trusting_both_for_a_while(store: ObjectStore, pairs: Keys) -> None:
    signed_run(store, pairs)
    publish(board_on(store, pairs.signers["b"], pairs.trust("a", "b")).open_run("math"), 3)
    both = reader(store, pairs, "a", "b")
    assert both.open_run("math").newest() == 3
    assert both.signers == sorted(signer.key_id for signer in pairs.signers.values())
    assert reader(store, pairs, "a").open_run("math").newest() == 2
    with pytest.raises(UntrustedRecordError):
        reader(store, pairs, "b").open_run("math")


def test_lost_replies_and_races_end_as_without_signatures(store: ObjectStore, pairs: Keys) -> None:
    signed_run(store, pairs)
    faulty = FaultyStore(store)
    run = board_on(faulty, pairs.signers["a"], pairs.trust("a")).open_run("math")
    ref = run.put_blob(3, "w-3.patch", b"patch")
    mine = manifest(run, 3, (ref,))
    faulty.lose_reply("manifest.json")
    run.commit(mine)  # read back, and recognised as our own
    run.commit(mine)
    rival = board_on(store, pairs.signers["b"], pairs.trust("a", "b")).open_run("math")
    with pytest.raises(PublishConflictError):
        publish(rival, 3)
    board = board_on(faulty, pairs.signers["a"], pairs.trust("a"))
    faulty.lose_reply("epochs/")
    assert board.begin_epoch("math", "w").epoch == 1


def test_a_torn_manifest_is_replaced_as_without_signatures(store: ObjectStore, pairs: Keys) -> None:
    signed_run(store, pairs)
    store.put(keys.manifest("math", 3), b"\0" * 64, mode="create")
    run = board_on(store, pairs.signers["a"], pairs.trust("a")).open_run("math")
    publish(run, 3)
    assert reader(store, pairs, "a").open_run("math").newest() == 3


# --- keys --------------------------------------------------------------------------------------


def pem_of(key: Any) -> bytes:
    return key.private_bytes(  # type: ignore[no-any-return]
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def test_a_new_pair_is_private_and_overwrites_nothing(tmp_path: Path) -> None:
    signer = generate(tmp_path / "k", tmp_path / "k.pub")
    assert (tmp_path / "k").stat().st_mode & 0o777 == 0o600
    assert Signer.load(tmp_path / "k").key_id == signer.key_id
    assert TrustedKeys.load([tmp_path / "k.pub"]).key_ids == [signer.key_id]
    before = (tmp_path / "k").read_bytes()
    with pytest.raises(UsageError, match="exists"):
        generate(tmp_path / "k", tmp_path / "other.pub")
    with pytest.raises(UsageError, match="exists"):
        generate(tmp_path / "new", tmp_path / "k.pub")
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "k").read_bytes() == before
    (tmp_path / "planted").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError):
        generate(tmp_path / "planted", tmp_path / "p.pub")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620, 0o610])
def test_a_key_that_others_can_touch_is_refused(pairs: Keys, mode: int) -> None:
    path = pairs.folder / "a"
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}"):
        Signer.load(path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "missing", "public", "garbage", "ec", "empty"])
def test_what_is_no_private_key_is_refused_without_showing_it(pairs: Keys, kind: str) -> None:
    path = pairs.folder / "bad"
    secret = b"very secret words"
    if kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind != "missing":
        data = {
            "public": (pairs.folder / "a.pub").read_bytes(),
            "garbage": secret,
            "ec": pem_of(ec.generate_private_key(ec.SECP256R1())),
            "empty": b"",
        }[kind]
        path.write_bytes(data)
        path.chmod(0o600)
    with pytest.raises(UsageError, match="bad") as caught:
        Signer.load(path)
    assert secret.decode() not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_an_encrypted_key_is_refused(tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"pass"),
    )
    with pytest.raises(UsageError, match="unencrypted"):
        Signer.parse(pem, "KEY")


def test_a_signer_shows_only_its_id_and_is_not_pickled(
    store: ObjectStore, pairs: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    signer = pairs.signers["a"]
    secret = (pairs.folder / "a").read_text().splitlines()[1]
    with caplog.at_level(logging.DEBUG):
        run = signed_run(store, pairs)
    shown = [repr(signer), str(signer), repr(run.board), repr(run.board.signed), caplog.text]
    assert repr(signer) == f"Signer({signer.key_id})"
    assert not any(secret in text for text in shown)
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            attempt(signer)
    stored = b"".join(
        path.read_bytes() for path in Path(store.url.removeprefix("file://")).rglob("*.json")
    )
    assert stored
    assert secret.encode() not in stored


@pytest.mark.parametrize("data", [b"", b"x", b"-----END PUBLIC KEY-----", b"PEM then junk"])
def test_files_that_hold_no_public_keys_alone_are_refused(pairs: Keys, data: bytes) -> None:
    path = pairs.folder / "t.pub"
    good = (pairs.folder / "a.pub").read_bytes()
    path.write_bytes(good + b"junk" if data == b"PEM then junk" else data)
    with pytest.raises(UsageError, match=r"t\.pub"):
        TrustedKeys.load([path])
    with pytest.raises(UsageError, match="PEM"):
        TrustedKeys.load([pairs.folder / "a"])


def test_one_file_may_hold_several_keys_and_none_is_never_everybody(pairs: Keys) -> None:
    path = pairs.folder / "all.pub"
    path.write_bytes(b"\n".join((pairs.folder / f"{n}.pub").read_bytes() for n in "ab"))
    assert len(TrustedKeys.load([path]).key_ids) == 2
    with pytest.raises(UsageError, match="must not be empty"):
        TrustedKeys.load([])
    with pytest.raises(UsageError, match="must not be empty"):
        open_board("memory://x", trusted_keys=[])


def test_boards_are_opened_with_key_files(tmp_path: Path, pairs: Keys) -> None:
    where = tmp_path / "b"
    new_run(open_board(where, signing_key=pairs.folder / "a"))
    opened = open_board(where, trusted_keys=[pairs.folder / "a.pub"])
    assert opened.open_run("math").newest() == 0
    with pytest.raises(UntrustedRecordError):
        open_board(where, trusted_keys=[pairs.folder / "b.pub"]).open_run("math")
