"""A store whose records are signed on their way in and checked on their way out.

What readers trust is signed: run records, manifests, records of merged patches and anchors, and
epochs. They name everything else by content. A signature is one more field of the record:

    "signature": {"algorithm": "ed25519", "key": <16 hex digits>, "value": <128 hex digits>}

It covers the key of the record, so a record at another key (of another run, version or kind) is not
signed, and the record without the field, in its canonical form.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stitch.board import keys
from stitch.board.stores.signing import Signer, TrustedKeys
from stitch.board.stores.store import ObjectStore, PutMode, StoreOver
from stitch.errors import CorruptRecordError, UntrustedRecordError
from stitch.strict_json import canonical_json, load_json

SIGNED_KINDS = frozenset({"run", "manifest", "merged", "anchor", "epoch"})
ALGORITHM = "ed25519"
FIELD = "signature"
_DOMAIN = b"stitch record 1\0"
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_VALUE = re.compile(r"[0-9a-f]{128}")


@dataclass(frozen=True)
class Signing:
    """What signs records that are put, and who must have signed those that are read."""

    signer: Signer | None
    trusted: TrustedKeys | None


def as_signing(
    signing_key: Signer | Path | None, trusted_keys: TrustedKeys | Sequence[Path] | None
) -> Signing | None:
    """Keys from their files; None where neither is given. An empty list of trusted keys is an
    error, since it would trust nobody or everybody."""
    if signing_key is None and trusted_keys is None:
        return None
    if isinstance(signing_key, Path):
        signing_key = Signer.load(signing_key)
    if trusted_keys is not None and not isinstance(trusted_keys, TrustedKeys):
        trusted_keys = TrustedKeys.load(trusted_keys)
    return Signing(signing_key, trusted_keys)


class SignedStore(StoreOver):
    """An ObjectStore over `inner` that signs and checks records. They are handed out unsigned."""

    def __init__(self, inner: ObjectStore, signing: Signing) -> None:
        super().__init__(inner)
        self._signer = signing.signer
        self._trusted = signing.trusted
        self._lock = threading.Lock()
        self._signers: set[str] = set()

    @property
    def signers(self) -> list[str] | None:
        """Ids of the keys whose signatures were met and believed; None if none are checked."""
        with self._lock:
            return None if self._trusted is None else sorted(self._signers)

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        """UntrustedRecordError for a record that no trusted key signed for this key."""
        data = self._inner.get(key, max_bytes=max_bytes)
        if data is None or keys.kind_of(key) not in SIGNED_KINDS or not data.strip(b"\0"):
            return data
        return self._checked(key, data)

    def put(self, key: str, source: bytes | Path, *, mode: PutMode) -> bool:
        if (
            self._signer is not None
            and isinstance(source, bytes)
            and keys.kind_of(key) in SIGNED_KINDS
        ):
            source = sign_record(key, source, self._signer)
        return self._inner.put(key, source, mode=mode)

    def signed_by(self, key: str, *, max_bytes: int) -> str | None:
        """The id of the key that the record at `key` names as its signer; None: it is unsigned.

        With trusted keys that is checked, and UntrustedRecordError raised as by `get`.
        """
        data = self._inner.get(key, max_bytes=max_bytes)
        if data is None:
            return None
        if self._trusted is not None:
            self._checked(key, data)
        return claimed_signer(key, data)

    def _checked(self, key: str, data: bytes) -> bytes:
        body, signature = _split(key, data)
        if self._trusted is not None:
            key_id = check_signature(key, data, self._trusted)
            with self._lock:
                self._signers.add(key_id)
        return data if signature is None else body


def sign_record(key: str, data: bytes, signer: Signer) -> bytes:
    """`data`, a record in canonical form, with the signature for `key` as one more field."""
    values = load_json(data, key)
    if not isinstance(values, dict) or FIELD in values or canonical_json(values) != data:
        raise CorruptRecordError(f"{key}: only an unsigned record in canonical form can be signed")
    signature = {
        "algorithm": ALGORITHM,
        "key": signer.key_id,
        "value": signer.sign(_message(key, data)).hex(),
    }
    return canonical_json({**values, FIELD: signature})


def check_signature(key: str, data: bytes, trusted: TrustedKeys) -> str:
    """The id of the trusted key that signed `data` for `key`; UntrustedRecordError otherwise."""
    body, signature = _split(key, data)
    if signature is None:
        raise UntrustedRecordError(f"{key} is not signed; trusted are {_ids(trusted)}")
    match signature:
        case {"algorithm": str(algorithm), "key": str(key_id), "value": str(value), **more}:
            pass
        case _:
            raise UntrustedRecordError(f"{key}: its signature has not the form of one")
    if algorithm != ALGORITHM or more:
        raise UntrustedRecordError(f"{key}: its signature is of a kind that is not known here")
    if not _KEY_ID.fullmatch(key_id) or not _VALUE.fullmatch(value):
        raise UntrustedRecordError(f"{key}: its signature has not the form of one")
    if key_id not in trusted:
        raise UntrustedRecordError(
            f"{key} is signed by key {key_id}, which is not trusted; trusted are {_ids(trusted)}"
        )
    if canonical_json({**_values(key, body), FIELD: signature}) != data:
        raise UntrustedRecordError(f"{key} is signed, but not in its canonical form")
    if not trusted.is_valid(key_id, bytes.fromhex(value), _message(key, body)):
        raise UntrustedRecordError(
            f"{key}: key {key_id} did not sign this record for this key; it was altered, or taken "
            "from elsewhere"
        )
    return key_id


def claimed_signer(key: str, data: bytes) -> str | None:
    """The key id that a record names, unchecked; None if it is not signed."""
    signature = _split(key, data)[1]
    found = signature.get("key") if isinstance(signature, dict) else None
    return found if isinstance(found, str) and _KEY_ID.fullmatch(found) else None


def _message(key: str, body: bytes) -> bytes:
    return _DOMAIN + key.encode("ascii") + b"\0" + body


def _split(key: str, data: bytes) -> tuple[bytes, object]:
    """The record in canonical form without its signature, and the signature, or None."""
    values = dict(_values(key, data))
    signature = values.pop(FIELD, None)
    return canonical_json(values), signature


def _values(key: str, data: bytes) -> dict[str, object]:
    values = load_json(data, key)
    if not isinstance(values, dict):
        raise CorruptRecordError(f"{key}: holds a {type(values).__name__}, wanted an object")
    return values


def _ids(trusted: TrustedKeys) -> str:
    return ", ".join(trusted.key_ids)
