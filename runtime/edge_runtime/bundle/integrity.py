"""Whether a bundle's files are those of its manifest, by their sha256, and whether the manifest is its maker's, by Ed25519."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from edge_devices.errors import errors_as
from edge_devices.files.atomic_write import atomic_write
from edge_devices.files.limited_read import read_at_most, read_regular, sha256_of
from edge_devices.files.user_cache import cache_folder, cache_put, read_entries
from edge_devices.machine.device_package import how_to_get
from edge_runtime.errors import BackendError, BundleError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


# Checks that files have the sha256 of the manifest: over all bytes, or by samples of files that passed the full check on this machine.
#
# The fast check trusts no file that was not hashed completely before. It compares the file's metadata (size, times of change, inode) and a
# hash of samples with the cached ones, as git and rsync do. Bytes that change on disk between the samples are found by the full check
# only.

# fast: see above; full: every byte, every time; none: only that the files exist and have the right sizes.
CheckMode = Literal["fast", "full", "none"]
CHECK_MODES: tuple[CheckMode, ...] = get_args(CheckMode)
CACHE_NAME = "checked.json"
SAMPLES, SAMPLE_BYTES = 64, 16 << 10
# A file that changed this recently could change again without a change of its time stamps.
_SETTLED_NS = 2_000_000_000


def read_part(path: Path, limit: int, kind: str) -> bytes:
    """Returns the bytes of a file of a bundle. Raises BundleError for one that has more than any such `kind`, or cannot be read."""
    with errors_as(BundleError, f"{path} cannot be read as a {kind}", "copy the bundle again, or export it again"):
        return read_at_most(path, limit)


def is_intact(path: Path, sha256: str, mode: CheckMode) -> bool:
    """Whether the file has this sha256, by this kind of check. Raises OSError if it cannot be read."""
    if mode == "none":
        return True
    memory = cache_folder() / CACHE_NAME
    key = hashlib.sha256(f"{path.resolve()}\0{sha256}".encode("utf-8", "surrogateescape")).hexdigest()
    before = _identity(path)
    if mode == "fast" and read_entries(memory).get(key) == {**before, "samples": samples_of(path)}:
        return True
    if sha256_of(path) != sha256:
        return False
    now = time.time_ns()
    if _identity(path) == before and max(before["changed_ns"], before["modified_ns"]) < now - _SETTLED_NS:
        cache_put(memory, key, {**before, "samples": samples_of(path)})
    return True


def samples_of(path: Path) -> str:
    """Returns the hex sha256 of SAMPLES pieces spread evenly over the file, including its first and last bytes."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _identity(path: Path) -> dict[str, int]:
    status: os.stat_result = path.stat()
    return {
        "bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
        "inode": status.st_ino,
        "device": status.st_dev,
    }


# The signature of a bundle: Ed25519 over its manifest, which holds the sha256 of every other file except config.yaml.
#
# `cryptography` is used rather than sigstore's model-signing, because the manifest already hashes all files and no identity service is
# needed. openssl reads and writes the same key and signature files. The only module of the runtime that imports cryptography.

SIGNATURE_SUFFIX = ".sig"
SIGNATURE_NAME = "manifest.json" + SIGNATURE_SUFFIX
_MAX_KEY_BYTES = 16 << 10
_MAX_SIGNATURE_FILE_BYTES = 4 << 10


def check_signature(folder: Path, manifest: bytes, public_key: Path) -> None:
    """Raises BundleError unless the bundle is signed by the owner of the key in `public_key`, a PEM file, over exactly these bytes."""
    path = folder / SIGNATURE_NAME
    with errors_as(BackendError, "checking signatures needs cryptography, which is not installed", how_to_get("sign"), ImportError):
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    try:
        key = load_pem_public_key(_read_key(public_key, "public"))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BundleError(
            f"{public_key} is not a public key in PEM format; make one with: openssl pkey -in KEY -pubout -out {public_key}"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise BundleError(f"{public_key} is not an Ed25519 key; make a pair with: openssl genpkey -algorithm ed25519 -out KEY")
    unsigned = "this bundle is not signed, so do not trust it, or ask its maker for a signed one"
    with errors_as(BundleError, f"the signature {path} cannot be read", unsigned):
        text = read_regular(path, _MAX_SIGNATURE_FILE_BYTES)
    try:
        key.verify(base64.b64decode(text.strip(), validate=True), manifest)
    except (InvalidSignature, binascii.Error, ValueError) as error:
        raise BundleError(f"{path} is not a signature of this manifest by the owner of {public_key}; do not use this bundle") from error


def sign_file(path: Path, key: Ed25519PrivateKey) -> Path:
    """Writes the signature of a file beside it; returns where."""
    target = path.with_name(path.name + SIGNATURE_SUFFIX)
    atomic_write(target, [base64.b64encode(key.sign(path.read_bytes())) + b"\n"])
    return target


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """Returns the private key in a PEM file without a password. Raises BundleError if it is none."""
    with errors_as(BackendError, "signing needs cryptography, which is not installed", how_to_get("sign"), ImportError):
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    try:
        key = load_pem_private_key(_read_key(path, "private"), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BundleError(
            f"{path} is no private key in PEM without a password; make one: openssl genpkey -algorithm ed25519 -out KEY"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise BundleError(f"{path} is no Ed25519 key; make one: openssl genpkey -algorithm ed25519 -out KEY")
    return key


def _read_key(path: Path, kind: str) -> bytes:
    """Reads at most _MAX_KEY_BYTES of the user's key file, which may be a symbolic link or a pipe."""
    unreadable = errors_as(BundleError, f"the {kind} key {path} cannot be read", f"give the PEM file of an Ed25519 {kind} key")
    with unreadable, path.open("rb") as file:
        return file.read(_MAX_KEY_BYTES)
