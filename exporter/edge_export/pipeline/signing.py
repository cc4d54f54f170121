"""Signs a bundle's manifest with an Ed25519 key. The only module of the exporter that imports cryptography."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

from edge_export.errors import ExportError
from edge_runtime.bundle.signature import INSTALL, SIGNATURE_NAME

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_MAX_KEY_BYTES = 16 << 10


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """Returns the private key in a PEM file without a password. Raises ExportError if it is none, before anything is made."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise ExportError(f"bundles are signed with cryptography, which is not installed ({error}); {INSTALL}") from error
    try:
        with path.open("rb") as file:
            key = load_pem_private_key(file.read(_MAX_KEY_BYTES), password=None)
    except OSError as error:
        raise ExportError(f"the key {path} cannot be read ({error.strerror or error}); check the path") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ExportError(
            f"{path} is no private key in PEM without a password; make one: openssl genpkey -algorithm ed25519 -out KEY"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ExportError(f"{path} is no Ed25519 key; make one: openssl genpkey -algorithm ed25519 -out KEY")
    return key


def sign_manifest(folder: Path, manifest: bytes, key: Ed25519PrivateKey) -> None:
    """Writes the signature of these bytes beside them."""
    (folder / SIGNATURE_NAME).write_bytes(base64.b64encode(key.sign(manifest)) + b"\n")
