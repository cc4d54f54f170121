"""Signs a bundle's manifest with an Ed25519 key."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

from edge_export.errors import ExportError
from edge_runtime.bundle import signature
from edge_runtime.errors import EdgeRuntimeError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """Returns the private key in a PEM file without a password. Raises ExportError if it is none, before anything is made."""
    try:
        return signature.read_signing_key(path)
    except EdgeRuntimeError as error:
        raise ExportError(str(error)) from error


def sign_manifest(folder: Path, manifest: bytes, key: Ed25519PrivateKey) -> None:
    """Writes the signature of these bytes beside them."""
    (folder / signature.SIGNATURE_NAME).write_bytes(base64.b64encode(key.sign(manifest)) + b"\n")
