"""Ed25519 keys (RFC 8032) for records: read from PEM files, held so that they do not leak.

Needs the package `cryptography`: `pip install 'stitch-rl[signing]'`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stitch.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

MAX_KEY_BYTES = 64 * 2**10
_PEM_END = b"-----END PUBLIC KEY-----"


class Signer:
    """A private key that signs. Never shows it, nor lets itself be pickled."""

    __slots__ = ("_key", "key_id", "public_pem")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        public = key.public_key()
        self.key_id = key_id_of(public)
        self.public_pem = _public_pem(public)

    @classmethod
    def load(cls, path: Path) -> Signer:
        """From a PEM file (PKCS #8, not encrypted) that only its owner can read.

        Raises UsageError, which never quotes the file, for anything else.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                _check_private(path, os.fstat(descriptor))
                return cls.parse(file.read(MAX_KEY_BYTES), str(path))
        except OSError as error:
            raise UsageError(f"signing key {path} cannot be read: {error.strerror}") from None

    @classmethod
    def parse(cls, pem: bytes, where: str) -> Signer:
        """From PEM text; `where` says in errors where it stood."""
        crypto = _cryptography()
        try:
            key = crypto.serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, crypto.UnsupportedAlgorithm):
            key = None  # what was raised may tell of the content
        if not isinstance(key, crypto.ed25519.Ed25519PrivateKey):
            raise UsageError(
                f"signing key {where} is not an unencrypted Ed25519 private key in PEM form"
            )
        return cls(key)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"Signer({self.key_id})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a signing key is not pickled")


class TrustedKeys:
    """Public keys whose signatures are believed; at least one."""

    def __init__(self, keys: Iterable[Ed25519PublicKey]) -> None:
        self._keys: Mapping[str, Ed25519PublicKey] = {key_id_of(key): key for key in keys}
        if not self._keys:
            raise UsageError("a set of trusted keys must not be empty")

    @classmethod
    def load(cls, paths: Iterable[Path]) -> TrustedKeys:
        """From PEM files, each with one public key or several. Raises UsageError."""
        found: list[Ed25519PublicKey] = []
        for path in paths:
            try:
                with path.open("rb") as file:
                    data = file.read(MAX_KEY_BYTES)
            except OSError as error:
                raise UsageError(f"trusted keys {path} cannot be read: {error.strerror}") from None
            found += _public_keys(data, path)
        return cls(found)

    @property
    def key_ids(self) -> list[str]:
        return sorted(self._keys)

    def __contains__(self, key_id: object) -> bool:
        return key_id in self._keys

    def is_valid(self, key_id: str, signature: bytes, message: bytes) -> bool:
        """Whether the trusted key `key_id` signed `message`."""
        try:
            self._keys[key_id].verify(signature, message)
            return True
        except _cryptography().InvalidSignature:
            return False

    def __repr__(self) -> str:
        return f"TrustedKeys({', '.join(self.key_ids)})"


def generate(private: Path, public: Path) -> Signer:
    """Write a new key pair: `private` for its owner alone. Raises UsageError if a file exists."""
    crypto = _cryptography()
    key = crypto.ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        crypto.serialization.Encoding.PEM,
        crypto.serialization.PrivateFormat.PKCS8,
        crypto.serialization.NoEncryption(),
    )
    signer = Signer(key)
    _create(private, pem, 0o600)
    try:
        _create(public, signer.public_pem, 0o644)
    except UsageError:
        private.unlink()
        raise
    return signer


def key_id_of(key: Ed25519PublicKey) -> str:
    """Short name of a public key: 16 hexadecimal digits of the SHA-256 of its 32 bytes."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def _public_keys(data: bytes, path: Path) -> list[Ed25519PublicKey]:
    crypto = _cryptography()
    blocks = [block.strip() + b"\n" + _PEM_END for block in data.split(_PEM_END)[:-1]]
    if not blocks or data.split(_PEM_END)[-1].strip():
        raise UsageError(f"{path} does not hold public keys in PEM form alone")
    found = []
    for number, block in enumerate(blocks, 1):
        try:
            key = crypto.serialization.load_pem_public_key(block)
        except (ValueError, crypto.UnsupportedAlgorithm):
            key = None
        if not isinstance(key, crypto.ed25519.Ed25519PublicKey):
            raise UsageError(f"{path}: key {number} is not an Ed25519 public key in PEM form")
        found.append(key)
    return found


def _public_pem(key: Ed25519PublicKey) -> bytes:
    crypto = _cryptography()
    return key.public_bytes(
        crypto.serialization.Encoding.PEM, crypto.serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _check_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"signing key {path} is not a file")
    if found.st_mode & 0o077:
        raise UsageError(
            f"signing key {path} can be read or written by others (mode "
            f"{stat.S_IMODE(found.st_mode):04o}): `chmod 600` it, and take another key if it "
            "may have been read"
        )
    if found.st_uid not in (0, os.geteuid()):
        raise UsageError(f"signing key {path} belongs to user {found.st_uid}, not to this one")


def _create(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise UsageError(f"{path} cannot be created: {error.strerror}") from None


class _Cryptography:
    """The parts of the library that are used here, under one roof."""

    def __init__(self) -> None:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519

        self.InvalidSignature: Any = InvalidSignature
        self.UnsupportedAlgorithm: Any = UnsupportedAlgorithm
        self.serialization = serialization
        self.ed25519 = ed25519


_loaded: _Cryptography | None = None


def _cryptography() -> _Cryptography:
    global _loaded
    if _loaded is None:
        try:
            _loaded = _Cryptography()
        except ImportError:
            raise UsageError(
                "signatures need the package cryptography: pip install 'stitch-rl[signing]'"
            ) from None
    return _loaded
