"""The bundle, which the exporter writes and the runtime reads: opening it, integrity checks, its signature, and its measured quality."""

from __future__ import annotations

import base64
import binascii
import difflib
import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, get_args

from edge_devices.errors import EdgeError, errors_as
from edge_devices.files.atomic_write import atomic_write
from edge_devices.files.limited_read import read_at_most, read_regular, sha256_of
from edge_devices.files.typed_json import StructureError, from_json
from edge_devices.files.user_cache import cache_folder, cache_put, entry_key, read_entries
from edge_devices.machine.device_package import how_to_get
from edge_runtime.bundle.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    SCHEMA_VERSION,
    BundleFile,
    Manifest,
    check_manifest,
    check_numbers,
    has_own_hash,
)
from edge_runtime.errors import BackendError, BundleError, RequestError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


# Integrity: checks that files have the SHA-256 of the manifest.
#
# The full check hashes every byte, every time. The fast check does so only once on each machine. Later it compares the file's metadata
# (size, times of change, inode) and a hash of samples with the cached ones, as git and rsync do. It cannot find bytes that changed on the
# disk between the samples; the full check can. With "none", files only have to exist and have the right sizes.
CheckMode = Literal["fast", "full", "none"]
CHECK_MODES: tuple[CheckMode, ...] = get_args(CheckMode)
CHECKED_NAME = "checked.json"
SAMPLES, SAMPLE_BYTES = 64, 16 << 10
# A file that changed this recently could change again and keep the same time stamps.
_SETTLED_NS = 2_000_000_000


def read_part(path: Path, limit: int, kind: str) -> bytes:
    """Returns the bytes of a file in a bundle. Raises BundleError if it has more than `limit` bytes or cannot be read; `kind` names it."""
    with errors_as(BundleError, f"{path} cannot be read as a {kind}", "copy the bundle again, or export it again"):
        return read_at_most(path, limit)


def is_intact(path: Path, sha256: str, mode: CheckMode) -> bool:
    """Whether the file has this SHA-256, by this kind of check. Raises OSError if it cannot be read."""
    if mode == "none":
        return True
    memory = cache_folder() / CHECKED_NAME
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
    """Returns the hex SHA-256 of SAMPLES pieces that are spread evenly over the file, including its first and last bytes."""
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


# The signature of a bundle: Ed25519 over its manifest, which contains the SHA-256 of every other file except config.yaml.
#
# We use `cryptography` rather than sigstore's model-signing, because the manifest already hashes all files, and no identity service is
# needed. openssl reads and writes the same key and signature files. No other module of the runtime imports cryptography.

SIGNATURE_SUFFIX = ".sig"
SIGNATURE_NAME = "manifest.json" + SIGNATURE_SUFFIX
_MAX_KEY_BYTES = 16 << 10
_MAX_SIGNATURE_FILE_BYTES = 4 << 10


def check_signature(folder: Path, manifest: bytes, public_key: Path) -> None:
    """Raises BundleError unless the bundle's signature of exactly these bytes was made with the private key of `public_key`, a PEM file."""
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
    """Writes the signature of a file next to it; returns the signature's path."""
    target = path.with_name(path.name + SIGNATURE_SUFFIX)
    atomic_write(target, [base64.b64encode(key.sign(path.read_bytes())) + b"\n"])
    return target


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """Returns the private key in a PEM file without a password. Raises BundleError if there is no such key in it."""
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


# Above this mean KL, in nats, the likeliest word is often not the model's own. With real matrices (docs/results.md), 8 bits have 0.03, a
# calibrated mix of 4 to 8 bits 0.1.
DEGRADED_KL = 0.3
# The cache file that remembers about which bundles the user was told.
MENTIONED_NAME = "mentioned.json"
# Figures must be below this. A manifest may contain any number: NaN, infinity, integers too large for a float.
_BEYOND = 1e300


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A quantized model compared with its reference over `rows` rows.

    `mean_kl` is the mean of KL(reference || quantized) in nats. `greedy_agreement` is the share of rows whose likeliest token is the
    reference's own, or ties with it.
    """

    rows: int
    mean_kl: float
    perplexity: float
    reference_perplexity: float
    greedy_agreement: float

    @property
    def words(self) -> str:
        """E.g. "keeps 81% of the model's first choices, perplexity 94 instead of 87 (mean KL 0.14)"."""
        return (
            f"keeps {self.greedy_agreement:.0%} of the model's first choices, perplexity {self.perplexity:.3g}"
            f" instead of {self.reference_perplexity:.3g} (mean KL {self.mean_kl:.3g})"
        )


def exported_quality(parity: object) -> Quality | None:
    """Returns the quality in the manifest's `parity` for one format; None if it was not measured or a figure is invalid."""
    figures = parity.get("quality") if isinstance(parity, dict) else None
    if not isinstance(figures, dict):
        return None
    values: dict[str, Any] = {name: figures.get(name) for name in Quality.__dataclass_fields__}
    sound = all(type(value) in (int, float) and 0 <= value < _BEYOND for value in values.values())
    return Quality(**values) if sound else None


def first_time(facts: Sequence[str]) -> bool:
    """Whether this is the first call with these facts on this machine; always True if there is no cache."""
    try:
        path = cache_folder() / MENTIONED_NAME
    except EdgeError:  # a user without a home folder
        return True
    key = entry_key(facts)
    if key in read_entries(path):
        return False
    cache_put(path, key, True)
    return True


def degradation(parity: object, name: str) -> str | None:
    """Returns a sentence that warns of a bundle with poor quality; None if its quality is good, or was not measured."""
    quality = exported_quality(parity)
    if quality is None or quality.mean_kl <= DEGRADED_KL:
        return None
    return f"{name} answers worse than its model: it {quality.words}; export it in a type of more bits, or calibrated."


# Opening a bundle: a directory with `manifest.json` and the files that it lists. This module checks files and opens no model.
# Layout and every field: docs/design/manifest.md.

# Advice is based on at most this many entries of a folder, so that an error comes at once.
_MAX_ENTRIES = 2000
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@[\w./-]+)?(?::[^:]+\.gguf|:\w+)?")
_CHECKPOINT_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")


def advice(folder: Path, manifest_name: str) -> str:
    """Returns advice about `folder`, which has no manifest, based on the files in it and next to it."""
    export = f"edge-export pair {shlex.quote(str(folder))} DRAFTER --output my-bundle"
    if folder.is_file():
        kind = "a GGUF file" if folder.suffix.lower() == ".gguf" else "a file"
        return f"it is {kind}; " + (f"make a bundle of it and its drafter with: {export}" if kind != "a file" else "give a bundle's folder")
    if not folder.exists():
        if near := _near(folder, manifest_name):
            return f"there is no such folder; did you mean {near}?"
        if hub_repository(str(folder)):
            return f"there is no such folder; if it names a checkpoint on the hub, make a bundle with: {_hub_export(str(folder))}"
        return "there is no such folder; make a bundle with edge-export, or check the path"
    names = {path.name for path in _entries(folder)}
    inner = sorted(path for path in _entries(folder) if (path / manifest_name).is_file())
    if inner:
        return f"it has no {manifest_name}, but {inner[0]} is one"
    ggufs = sorted(name for name in names if name.lower().endswith(".gguf"))
    if len(ggufs) >= 2:
        both = " ".join(shlex.quote(str(folder / name)) for name in _target_first(ggufs))
        return f"it holds GGUF files; make a bundle with: edge-export pair {both} --output my-bundle"
    if names & {*_CHECKPOINT_FILES}:
        return f"it holds a checkpoint; make a bundle of it and its drafter with: {export}"
    return f"it has no {manifest_name}; make one with edge-export"


def hub_repository(name: str) -> str | None:
    """Returns the OWNER/NAME part of a name on the hub; None if `name` is not of that form."""
    match = _HUB_NAME.fullmatch(name)
    return match[1] if match else None


def _hub_export(name: str) -> str:
    repository = hub_repository(name) or name
    # edge-export finds the drafter by itself for Google's targets and for GGUF files.
    known = ":" in name or repository.lower().endswith("-gguf") or repository.startswith("google/")
    drafter = "" if known else f" {repository}-assistant"
    return f"edge-export pair {shlex.quote(name)}{drafter} --output {repository.rpartition('/')[2]}"


def _target_first(names: list[str]) -> list[str]:
    """Returns the names of the target and the drafter among GGUF files. Names of drafters contain certain words."""
    drafters = [name for name in names if re.search("assistant|draft|mtp", name, re.IGNORECASE)]
    targets = [name for name in names if name not in drafters]
    return [*targets[:1], *drafters[:1]] if targets and drafters else names[:2]


def _near(folder: Path, manifest_name: str) -> Path | None:
    bundles = {path.name: path for path in _entries(folder.parent) if (path / manifest_name).is_file()}
    names = difflib.get_close_matches(folder.name, bundles, n=1)
    return bundles[names[0]] if names else None


def _entries(folder: Path) -> list[Path]:
    try:
        return list(islice(folder.iterdir(), _MAX_ENTRIES))
    except OSError:
        return []


_LONGEST_PATH = 200
# More than any bundle has.
_MAX_FILES = 64


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder, and its manifest, which was checked."""

    folder: Path
    manifest: Manifest

    def file(self, role: str, format: str | None = None) -> BundleFile:
        """Returns the file with this role. Raises BundleError if the bundle has none."""
        for entry in self.manifest.files:
            if entry.role == role and format in (None, entry.format):
                return entry
        kind = role if format is None else f"{format} {role}"
        raise BundleError(f"{self.folder}: the bundle has no {kind}; export it again with this format")

    def has(self, role: str, format: str | None = None) -> bool:
        """Whether there is a file with this role."""
        return any(entry.role == role and format in (None, entry.format) for entry in self.manifest.files)

    def path(self, role: str, format: str | None = None) -> Path:
        """Returns the path of the file with this role."""
        return self.folder / self.file(role, format).path


def open_bundle(folder: Path | str, *, check: CheckMode = "fast", public_key: Path | None = None) -> Bundle:
    """Reads and checks a bundle: schema version, structure, that paths are inside the folder, sizes, and contents (see `CheckMode`).

    If a `public_key` (PEM, Ed25519) is given, it checks the signature too. Raises BundleError, which says what is wrong and what to do, and
    RequestError for a key together with check none.
    """
    if public_key is not None and check == "none":
        raise RequestError("a public key cannot vouch for files that are not checked; leave out check none, or the key")
    folder = Path(folder)
    manifest = _read_manifest(folder, public_key)
    check_manifest(folder, manifest)
    _check_list(folder, manifest.files)
    for entry in manifest.files:
        _check_file(folder, entry, check)
    return Bundle(folder, manifest)


def _read_manifest(folder: Path, public_key: Path | None) -> Manifest:
    path = folder / MANIFEST_NAME
    if not os.path.lexists(path):
        raise BundleError(f"{folder} is not a bundle: {advice(folder, MANIFEST_NAME)}")
    with errors_as(BundleError, f"{path} cannot be read", "check the disk, or copy the bundle again, or export it again"):
        raw = read_regular(path, MAX_MANIFEST_BYTES)
    if public_key is not None:
        check_signature(folder, raw, public_key)
    with errors_as(BundleError, f"{path} is not JSON", "export the bundle again", ValueError, RecursionError):
        data = json.loads(raw.decode("utf-8"))
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is not int:
        raise BundleError(f"{path} has no schema_version; it is not an edge-mtp manifest")
    if version != SCHEMA_VERSION:
        remedy = "upgrade edge-mtp" if version > SCHEMA_VERSION else "export the bundle again"
        raise BundleError(f"{path} has schema version {str(version)[:20]}, this reader supports {SCHEMA_VERSION}; {remedy}")
    if not has_own_hash(raw):
        raise BundleError(f"{path} does not match the sha256 in its last line; copy the bundle again or export it again")
    try:
        manifest = from_json(Manifest, data, "manifest")
        check_numbers(manifest, "manifest")
    except StructureError as error:
        raise BundleError(f"{path}: {error}; export the bundle again") from error
    return manifest


def _check_list(folder: Path, files: tuple[BundleFile, ...]) -> None:
    """Raises BundleError if the list is too long, or names a file or a role twice: a file must not be hashed thousands of times."""
    if len(files) > _MAX_FILES:
        raise BundleError(f"{folder}: the manifest lists {len(files)} files, more than {_MAX_FILES}; do not use this bundle")
    named: set[object] = set()
    for entry in files:
        for name in (PurePosixPath(entry.path), (entry.role, entry.format)):
            if name in named:
                raise BundleError(f"{folder}: the manifest lists {entry.path[:80]!r} or its role twice; do not use this bundle")
            named.add(name)


def _check_file(folder: Path, entry: BundleFile, check: CheckMode) -> None:
    relative = PurePosixPath(entry.path)
    if (
        relative.is_absolute()
        or ".." in relative.parts
        or "\\" in entry.path
        or not relative.parts
        or not entry.path.isprintable()
        or len(entry.path) > _LONGEST_PATH
    ):
        raise BundleError(f"{folder}: the manifest names {entry.path[:80]!r}, a path outside the bundle; do not use this bundle")
    path = folder / relative
    if path.resolve() != folder.resolve() / relative:
        raise BundleError(f"{path} is a symbolic link or lies behind one, and a bundle holds none; do not use this bundle")
    if not path.is_file():
        raise BundleError(f"{path} is missing; copy the bundle again or export it again")
    if path.stat().st_size != entry.bytes:
        raise BundleError(f"{path} has {path.stat().st_size} bytes, the manifest says {entry.bytes}; copy the bundle again")
    with errors_as(BundleError, f"{path} cannot be read", "check the disk, or copy the bundle again"):
        intact = is_intact(path, entry.sha256, check)
    if not intact:
        raise BundleError(f"{path} does not have the sha256 of the manifest; copy the bundle again or export it again")
