"""Graphs with their weights as this CPU's kernels want them, kept on the machine that packed them.

onnxruntime packs quantized weights anew in memory each time it opens a graph. Saved once, the packed form is mapped: opening is
quicker, and memory is shared and given back under pressure. It is right for one kind of CPU and one version of onnxruntime.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from edge_devices.files.limited_read import read_regular, sha256_of
from edge_devices.files.temp_files import clear_stale, temporary_of
from edge_devices.files.user_cache import CACHE_VARIABLE, only_ours
from edge_devices.machine.facts import cpu_identity
from edge_runtime.bundle.integrity import CheckMode, is_intact
from edge_runtime.errors import BackendError

RECORD_NAME = "record.json"
_MAX_RECORD_BYTES = 1 << 16
# The file holds the weights as they were and packed.
SIZE_FACTOR = 2.5
# Where a graph's data file holds packed weights, as the graph says it (onnxruntime, core/framework/prepacked_weights_container.cc).
_PLACE = re.compile(rb"MatMulNBits\+\d+\|(\d+);\d+;")
# Kernels lay packed weights out by the address they are at: on another line of the processor's cache they are misread.
_LINE = 64


@dataclass(frozen=True, kw_only=True)
class PackedRecord:
    """What a packed graph is valid for: the weights, the CPU and the onnxruntime version. Not `usable`: it cannot be packed.

    `files`: the sha256 of each file, by name.
    """

    weights: str
    onnxruntime: str
    system: str
    cpu: list[str]
    usable: bool = True
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PackingPlace:
    """Where packed graphs are kept. `weights` identifies the pair's files (a hash); `notify` gets a sentence when something is packed.

    `check` is how the pair's files were checked against that hash, and how packed ones are against their own.
    """

    folder: Path
    weights: str
    check: CheckMode
    notify: Callable[[str], None]


def packed_graph(path: Path, data_bytes: int, place: PackingPlace, version: str, save: Callable[[Path, str], bool]) -> Path:
    """Returns the packed form of the graph at `path`, made by `save(path, name of its data file)` if there is none that fits this machine.

    One that was packed on another CPU, by another onnxruntime or of other weights, that has changed since, or that others may write, is not
    used but replaced.
    Where it cannot be kept, or `save` says that it would not be read right, `notify` hears why and `path` itself is returned. So it is
    where nothing is packed and the pair's files were not checked: other weights would be kept under the hash. `data_bytes` is the most
    its weights can have.
    """
    home = place.folder / path.stem
    record = PackedRecord(weights=place.weights, onnxruntime=version, system=platform.machine(), cpu=cpu_identity())
    private = all(map(_is_private, (place.folder, home, home / RECORD_NAME)))
    stored = _read(home / RECORD_NAME) if private else None
    hashes = {} if stored is None else stored.pop("files", {})
    current = asdict(record)
    del current["files"]
    if stored == current and _are_intact(home, {path.name, _data_name(path)}, hashes, place.check):
        return home / path.name
    if stored == current | {"usable": False}:
        return path
    if place.check == "none":
        place.notify(f"The weights of {path.name} are not kept packed, as they were not checked; open the bundle with a check.")
        return path
    if stored is not None:
        differing = ", ".join(key for key, value in current.items() if stored.get(key) != value)
        reason = f"not for this machine or bundle ({differing})" if differing else "damaged"
        place.notify(f"The packed weights in {home} are {reason}; they are packed anew.")
    elif not private and home.exists():
        place.notify(f"The packed weights in {home} are another user's, or others may write them; they are packed anew.")
    try:
        return _pack(path, home, data_bytes, record, place, save)
    except (OSError, BackendError) as error:
        place.notify(f"Packed weights could not be kept in {home} ({error}); set {CACHE_VARIABLE} to a folder with room.")
        return path


def _pack(path: Path, home: Path, data_bytes: int, record: PackedRecord, place: PackingPlace, save: Callable[[Path, str], bool]) -> Path:
    if place.folder.exists() and not _is_private(place.folder):
        shutil.rmtree(place.folder)  # whoever could write it may have put anything there
    place.folder.mkdir(parents=True, exist_ok=True)
    place.folder.chmod(0o700)
    needed, free = int(data_bytes * SIZE_FACTOR), shutil.disk_usage(place.folder).free
    if needed > free:
        raise BackendError(f"{needed} bytes are needed, {free} are free")
    place.notify(f"Packing the weights of {path.name} for this CPU, once.")
    clear_stale(home)
    scratch = temporary_of(home)
    try:
        partial = scratch / path.stem
        partial.mkdir(parents=True)
        partial.chmod(0o700)
        if not save(partial / path.name, _data_name(path)):
            place.notify(f"onnxruntime would misread the packed weights of {path.name} from a file; they are packed anew each time.")
            record = replace(record, usable=False)
            for file in partial.iterdir():
                file.unlink()
        record = replace(record, files={file.name: sha256_of(file) for file in partial.iterdir()})
        (partial / RECORD_NAME).write_text(json.dumps(asdict(record)), encoding="utf-8")
        for file in partial.iterdir():
            file.chmod(0o600)
        if home.exists():
            home.rename(scratch / "replaced")
        partial.rename(home)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return home / path.name if record.usable else path


def _data_name(path: Path) -> str:
    return f"{path.stem}.packed"


def _are_intact(home: Path, names: set[str], hashes: object, check: CheckMode) -> bool:
    """Whether these files are in the folder with their recorded hashes."""
    if not isinstance(hashes, dict) or hashes.keys() != names:
        return False
    try:
        return all(_is_private(home / name) and is_intact(home / name, str(hashes[name]), check) for name in names)
    except OSError:
        return False


def _is_private(path: Path) -> bool:
    """Whether it is there, no link, this user's own, and for nobody else to write: another file than the checked one could be mapped."""
    try:
        state = path.lstat()
    except OSError:
        return False
    return only_ours(state) and not stat.S_ISLNK(state.st_mode)


def well_placed(graph: bytes) -> bool:
    """Whether a saved graph's packed weights lie where its kernels will find them."""
    return all(int(place) % _LINE == 0 for place in _PLACE.findall(graph))


def _read(path: Path) -> dict[str, object] | None:
    try:
        data = json.loads(read_regular(path, _MAX_RECORD_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
