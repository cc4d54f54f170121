"""Where a pair comes from: folders, hub names or GGUF files that the user names, or the trained pairs that the package contains."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edge_devices.errors import errors_as
from edge_devices.files.limited_read import sha256_of
from edge_devices.waiting import Progress
from edge_export.checkpoint.checkpoint import (
    MAX_CONFIG_BYTES,
    Checkpoint,
    check_pair,
    mismatch,
    open_checkpoint,
    open_gguf,
    planned_checkpoint,
    quantization_of,
)
from edge_export.checkpoint.hub import (
    PATTERNS,
    Listings,
    bytes_to_fetch,
    check_links,
    check_pair_exists,
    fetch,
    fetch_config,
    hub_name,
    local_gguf,
    local_ggufs,
)
from edge_export.checkpoint.safetensors import (
    INDEX_NAME,
    READABLE,
    SINGLE_NAME,
    SOURCE_TYPE,
    FloatType,
    mapped,
    read_header,
    read_json_object,
)
from edge_export.checkpoint.tokenizer_vocabulary import (
    OLD_TEMPLATE_NAME,
    TEMPLATE_NAME,
    TOKENIZER_NAME,
    GgufVocabulary,
    TokenTable,
    read_table,
    read_vocabulary,
)
from edge_export.checkpoint.weight_formats import published_config
from edge_export.errors import CheckpointError, ExportError
from edge_runtime.bundle.gguf_header import GgufHeader, LongArray, string_array
from edge_runtime.bundle.manifest import ModelSource, SourceFile

# The trained pairs in the package are small Gemma 4 targets with their MTP drafters, as Hugging Face folders.
#
# A widened target has the same output as the original but costs as much to run as a phone-sized model. A gated feed-forward layer is
# down(act(gate x) * up x). Widening adds rows of zeros to gate and up, and columns of zeros to down, which add act(0) * 0 = 0 to every sum.
# In the file the zeros are holes, which take no disk space on common file systems.

_REFERENCE, _CHAT = "reference_pair", "chat_pair"
DESCRIPTION = "the shipped example, which continues Python code and its documentation; it was never taught to answer questions"
CHAT_DESCRIPTION = "the shipped example for a chat, which was taught short answers about Python, units and edge-mtp; it knows nothing else"
WIDENED = "; zeros give it the cost of a phone-sized model"
# The factor of widening. It makes 488 million target weights of 8 million, so a token reads about as many bytes as in a phone-sized 4-bit
# model.
FACTOR = 96
_ROWS, _COLUMNS = (".mlp.gate_proj.weight", ".mlp.up_proj.weight"), ".mlp.down_proj.weight"


def reference_pair() -> tuple[Path, Path]:
    """Returns the folders of the shipped target and drafter. Raises ExportError if the package was installed without them."""
    return _shipped(_REFERENCE)


def chat_pair() -> tuple[Path, Path]:
    """As `reference_pair`, but returns the pair that was then trained on a few hundred short answers."""
    return _shipped(_CHAT)


def shipped_acceptance(drafter: Path) -> dict[str, Any]:
    """Returns the counts of drafts that were measured with the shipped pair of this drafter. They hold for the widened pair too."""
    counts: dict[str, Any] = json.loads((drafter.parent / "drafts.measured.json").read_text(encoding="utf-8"))
    return counts


def _shipped(name: str) -> tuple[Path, Path]:
    # The package is never run from an archive, because its model files are read by path. So a resource is a real folder.
    folder = Path(str(files("edge_export"))) / name
    target, drafter = folder / "target", folder / "drafter"
    for part in (target, drafter):
        if not (part / "config.json").is_file():
            raise ExportError(f"the {name.replace('_', ' ')} is not installed: {part} has no config.json; install edge-mtp again")
    return target, drafter


@contextlib.contextmanager
def widened_target(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder with the widened copy of a target's checkpoint."""
    with tempfile.TemporaryDirectory(prefix="edge-export-") as place:
        output = Path(place) / "reference-widened"
        widen_target(folder, output)
        yield output


def widen_target(folder: Path, output: Path, factor: int = FACTOR) -> None:
    """Writes the widened copy of a target's checkpoint to the new folder `output`."""
    output.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["intermediate_size"] *= factor
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        if path.name not in ("config.json", SINGLE_NAME):
            shutil.copy(path, output / path.name)
    _widen(folder / SINGLE_NAME, output / SINGLE_NAME, factor)


def _widen(source: Path, output: Path, factor: int) -> None:
    tensors, header, end = read_header(source), dict[str, dict[str, Any]](), 0
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        if name.endswith((*_ROWS, _COLUMNS)):
            shape[1 if name.endswith(_COLUMNS) else 0] *= factor
        begin, end = end, end + tensor.bytes * prod(shape) // prod(tensor.shape)
        header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with output.open("wb") as file:  # bytes that are never written are zeros
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    for name, wide in read_header(output).items():
        values = np.memmap(output, READABLE[wide.dtype], "r+", wide.offset, wide.shape)
        values[tuple(map(slice, tensors[name].shape))] = mapped(tensors[name])


# Files of a checkpoint folder, besides the weights, on which the bundle depends.
_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    INDEX_NAME,
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE_NAME,
    OLD_TEMPLATE_NAME,
    "README.md",
)
_QAT = "qat-"


@dataclass(frozen=True, kw_only=True)
class ResolvedSource:
    """One half of the pair. `origin` is the name that the user gave. `gguf` is the header of an existing GGUF, which is used unchanged.

    `tokenizer` is that of the checkpoint's own folder, or the target's if a drafter has none; None for a GGUF.
    """

    role: str
    origin: str
    checkpoint: Checkpoint
    gguf: GgufHeader | None = None
    tokenizer: GgufVocabulary | None = None

    @property
    def path(self) -> Path:
        """The checkpoint folder, or the GGUF file."""
        return self.checkpoint.folder

    @property
    def public_name(self) -> str:
        """A hub id unchanged, or the last part of a local path, because a bundle must not reveal its maker's folders."""
        path = Path(self.origin)
        return (path.name or path.resolve().name) if path.exists() else self.origin

    @property
    def quantization(self) -> str | None:
        """The quantization of an existing GGUF; None for a checkpoint."""
        return None if self.gguf is None else quantization_of(self.gguf)

    @property
    def stored_type(self) -> FloatType:
        """The float type in which most of the checkpoint's weights are stored, which keeps them exactly."""
        sizes: dict[str, int] = {}
        for tensor in self.checkpoint.tensors.values():
            if tensor.dtype in SOURCE_TYPE:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
        largest = max(sizes, key=lambda dtype: sizes[dtype], default="F32")
        return "bf16" if largest == "BF16" else "f16" if largest == "F16" else "f32"


def resolve_pair(target: str, drafter: str, progress: Progress | None = None) -> tuple[ResolvedSource, ResolvedSource]:
    """Opens both halves and checks that they are a pair. Reads headers and tokenizers, but no weights.

    It may download from the hub; `progress` then shows that. Raises CheckpointError if a half cannot be read, if target and drafter are
    exchanged, or if they are not a pair.
    """
    with _readable(f"{target} or {drafter}"):
        return _resolved(target, drafter, progress)


def resolve_target(target: str) -> ResolvedSource:
    """Opens only a target's checkpoint, as `resolve_pair` does. Raises CheckpointError, also if it is a GGUF."""
    with _readable(target):
        source = _open("target", target, None)
        if source.gguf is not None:
            raise CheckpointError(f"{target} is a GGUF file; give the folder or hub name of a checkpoint")
        _check_target(source)
        return _with_tokenizer(source, _table(source), None)


@contextlib.contextmanager
def _readable(names: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or names} cannot be read ({error.strerror or error}); check the checkpoint") from error


def _check_target(source: ResolvedSource) -> None:
    if source.checkpoint.model_type.endswith("_assistant"):
        raise CheckpointError(f"{source.origin} is an assistant, not a full model; give the full model first, its assistant second")


def planned_pair(target: str, drafter: str) -> tuple[ResolvedSource, ResolvedSource]:
    """Opens both halves for a plan. A plan needs no weights, so config.json is enough in a hub repository or a folder.

    A published size, such as E2B, is accepted as a name too. Raises CheckpointError.
    """
    first, second = _planned("target", target), _planned("drafter", drafter)
    if first is None and second is None:
        return resolve_pair(target, drafter)
    with _readable(f"{target} or {drafter}"):
        return first or _open("target", target, None), second or _open("drafter", drafter, None)


def planned_download(source: ResolvedSource) -> tuple[int, bool]:
    """Returns the bytes that an export of this half downloads, and whether they are from the hub's listing.

    Otherwise they are computed from its config, for the text model only.
    """
    if _local(source.origin).exists():
        return 0, True
    name = hub_name(source.origin)
    listed = None if name is None else bytes_to_fetch(name)
    return (sum(tensor.bytes for tensor in source.checkpoint.tensors.values()), False) if listed is None else (listed, True)


def _local(origin: str) -> Path:
    """Returns a name as a local path. `~name` of an unknown user is left as it is."""
    with contextlib.suppress(RuntimeError):
        return Path(origin).expanduser()
    return Path(origin)


def _planned(role: str, origin: str) -> ResolvedSource | None:
    """Opens a half by its config alone. Returns None if weights are here, because their files say more."""
    path = _local(origin)
    config = None if path.exists() else published_config(origin, assistant=role == "drafter")
    if config is None:
        name = None if path.exists() else hub_name(origin)
        path = path if name is None else fetch_config(name)
        if not path.is_dir() or any(path.glob("*.safetensors")):
            return None
        config = read_json_object(path / "config.json", MAX_CONFIG_BYTES)
    return ResolvedSource(role=role, origin=origin, checkpoint=planned_checkpoint(config, path / "config.json"))


def _resolved(target: str, drafter: str, progress: Progress | None) -> tuple[ResolvedSource, ResolvedSource]:
    listings = check_pair_exists(*(None if _local(origin).exists() else hub_name(origin) for origin in (target, drafter)))
    first, second = _open("target", target, progress, listings), _open("drafter", drafter, progress, listings)
    _check_target(first)
    if not second.checkpoint.model_type.endswith("_assistant"):
        raise CheckpointError(
            f"{drafter} is a {second.checkpoint.model_type} model, not an MTP assistant; give its assistant as the drafter"
        )
    check_pair(first.checkpoint, second.checkpoint)
    theirs, own = _table(first), _table(second)
    if theirs is not None and own is not None:
        _check_tables(first, second, theirs, own)
    first = _with_tokenizer(first, theirs, own)
    if own is None and second.gguf is None and first.tokenizer is not None:
        second = replace(second, tokenizer=first.tokenizer)
    else:
        second = _with_tokenizer(second, own, theirs)
    _check_vocabularies(first, second)
    return first, second


def mixed_training(target: ResolvedSource, drafter: ResolvedSource) -> str | None:
    """Returns a warning if the names say that only one half was trained for quantization; else None."""
    trained = [_QAT in Path(source.origin).name.lower() for source in (target, drafter)]
    if trained[0] == trained[1]:
        return None
    named = target.origin if trained[0] else drafter.origin
    return (
        f"Warning: {named} was trained for quantization, and what it is paired with was not; drafts are accepted more often"
        " where both are of one release (for -qat- targets, the -qat-...-assistant)."
    )


def manifest_source(source: ResolvedSource, progress: Callable[[int], None]) -> ModelSource:
    """Hashes the files that the export reads and returns the manifest's entry. `progress` gets the bytes read since its last call."""
    files = tuple(_hashed(path, progress) for path in source_files(source))
    return ModelSource(origin=source.public_name, model_type=source.checkpoint.model_type, files=files)


def source_files(source: ResolvedSource) -> list[Path]:
    """Returns the files of this half that an export reads, weights first."""
    if source.gguf is not None:
        return [source.path]
    weights = sorted({tensor.path for tensor in source.checkpoint.tensors.values()})
    return weights + [source.path / name for name in _SIDE_FILES if (source.path / name).is_file()]


def _open(role: str, origin: str, progress: Progress | None, listings: Listings | None = None) -> ResolvedSource:
    path = _local(origin)
    if not path.exists():
        name = hub_name(origin)
        if name is None:
            raise CheckpointError(
                f"the {role} {origin} does not exist; give a checkpoint folder, a GGUF file,"
                " or a hub name like google/name or owner/name:file.gguf"
            )
        path = fetch(name, role, progress, listings)
    if path.is_dir() and (ggufs := local_ggufs(path)):
        file = local_gguf(path, role)
        if file is None:
            raise CheckpointError(
                f"{origin} holds no GGUF file for a {role} ({', '.join(ggufs[:3])}); name the file, or give its assistant as DRAFTER"
            )
        check_links(path, [path / file])
        path /= file
    if path.is_file():
        checkpoint, header = open_gguf(path)
        return ResolvedSource(role=role, origin=origin, checkpoint=checkpoint, gguf=header)
    check_links(path, [each for each in sorted(path.iterdir()) if any(fnmatch(each.name, pattern) for pattern in PATTERNS)])
    return ResolvedSource(role=role, origin=origin, checkpoint=open_checkpoint(path))


def _table(source: ResolvedSource) -> TokenTable | None:
    """Returns the token table of a checkpoint folder; None for a GGUF and for a folder without a tokenizer."""
    return read_table(source.path) if source.gguf is None and (source.path / TOKENIZER_NAME).is_file() else None


def _with_tokenizer(source: ResolvedSource, table: TokenTable | None, other: TokenTable | None) -> ResolvedSource:
    """Returns the source with its vocabulary, which includes added tokens that only the `other` half has."""
    if source.gguf is not None:
        return source
    if table is None:
        raise CheckpointError(f"{source.path} has no {TOKENIZER_NAME}; download the checkpoint again, with all its files")
    return replace(source, tokenizer=read_vocabulary(table, other.added if other is not None else None))


def _check_vocabularies(target: ResolvedSource, drafter: ResolvedSource) -> None:
    if target.tokenizer is not None and drafter.tokenizer is not None:
        return
    if _gguf_pieces(target) != _gguf_pieces(drafter):
        raise CheckpointError(
            f"{drafter.origin} is not the assistant of {target.origin}: their vocabularies differ; give the halves of one release"
        )


def _check_tables(target: ResolvedSource, drafter: ResolvedSource, theirs: TokenTable, own: TokenTable) -> None:
    """Raises CheckpointError unless both tokenizers agree on shared ids and pieces.

    Only added tokens may be missing in one of them, as <|video|> is missing in the published assistants.
    """
    if theirs.ids == own.ids:
        return
    pieces_of = [{index: piece for piece, index in table.ids.items()} for table in (theirs, own)]
    for piece in (*theirs.ids, *own.ids):
        own_id, their_id = own.ids.get(piece), theirs.ids.get(piece)
        if own_id == their_id:
            continue
        place = their_id if own_id is None else own_id
        added = piece in theirs.added if own_id is None else piece in own.added
        if None not in (own_id, their_id) or not added or all(place in pieces for pieces in pieces_of):
            why = f"their tokenizers differ, first in the piece {piece!r} (id {own_id} against {their_id})"
            raise mismatch(target.checkpoint, drafter.checkpoint, why)


def _gguf_pieces(source: ResolvedSource) -> LongArray:
    if source.gguf is None:
        assert source.tokenizer is not None
        return string_array(source.tokenizer.pieces)
    pieces = source.gguf.keys["tokenizer.ggml.tokens"]
    assert isinstance(pieces, LongArray)  # open_gguf rejects a file without them
    return pieces


def _hashed(path: Path, progress: Callable[[int], None]) -> SourceFile:
    with errors_as(CheckpointError, f"{path} cannot be read", "check the checkpoint"):
        return SourceFile(name=path.name, bytes=path.stat().st_size, sha256=sha256_of(path, progress=progress))
