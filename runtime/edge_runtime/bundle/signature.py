"""The signature of a bundle: Ed25519 over its manifest, which holds the sha256 of every other file except config.yaml.

`cryptography` is used rather than sigstore's model-signing, because the manifest already hashes all files and no identity service is
needed. openssl reads and writes the same key and signature files. The only module of the runtime that imports cryptography.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import TYPE_CHECKING

from edge_devices.errors import errors_as
from edge_devices.files.atomic_write import atomic_write
from edge_devices.files.limited_read import read_regular
from edge_devices.machine.device_package import how_to_get
from edge_runtime.errors import BackendError, BundleError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

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
