"""Repositories of the Hugging Face hub: which of their files belong together, and the download of a pair, which can be resumed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from edge_devices.waiting import Progress
from edge_export.checkpoint.hub_client import cache_folder, download, hub_errors, is_cached, listing
from edge_export.checkpoint.weight_formats import ADAPTER_NAME
from edge_export.errors import CheckpointError
from edge_runtime.bundle.gguf_header import GgufError, read_architecture

# Finding in a listing of GGUF files the target for a tag, and its drafter.
#
# The rules are llama.cpp's (common/download.cpp: find_best_model, find_best_sibling), so that a name means the same files in both. There
# are two additions: the role of a file is taken from its header if that can be read, else from its name, whose case does not matter; and a
# tag must be a whole word of the name.

# The roles that are known from headers, by file name: "target", "drafter" or "other".
Roles = Mapping[str, str]
_UNKNOWN: Roles = MappingProxyType({})
_DRAFTER_WORDS = frozenset(("mtp", "assistant", "draft", "drafter"))
_OTHERS = ("mmproj", "imatrix", "eagle3-", "dflash-", "dspark-")
# Tried in this order if no tag is given.
_DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
# How a name's tag is found: the last word that is the name of a quantization, else the last word.
_QUANTIZATION = re.compile(r"(?<![A-Za-z0-9])(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4)(?=[-.]|$)", re.IGNORECASE | re.ASCII)
_LAST_WORD = re.compile(r"[-.](\w+)$", re.ASCII)


def file_of_role(files: list[str], role: str, tag: str | None, roles: Roles = _UNKNOWN) -> str | None:
    """Returns the target's file, or the file of that target's drafter; None if there is none."""
    target = target_file(files, tag, roles)
    return target if role == "target" else drafter_file(files, target, tag, roles)


def target_file(files: list[str], tag: str | None = None, roles: Roles = _UNKNOWN) -> str | None:
    """Returns the target with a tag such as Q4_0. Without a tag, returns that with Q4_K_M, else with Q8_0, else the first. Or None."""
    targets = _of_role(files, "target", roles)
    for asked in (tag,) if tag else _DEFAULT_TAGS:
        # First looks for the tag in file names, then in whole paths.
        for text in (lambda name: PurePosixPath(name).name, str):
            if named := next((name for name in targets if _has_tag(text(name), asked)), None):
                return named
    return None if tag else next(iter(targets), None)


def drafter_file(files: list[str], target: str | None, tag: str | None = None, roles: Roles = _UNKNOWN) -> str | None:
    """Returns the drafter for a target of the same listing; None if there is none.

    Candidates are in the target's folder or in one above it. The deepest folder is preferred, then a name with the tag, then the nearest
    number of bits. If there are none, a drafter in any other folder is taken, because some repositories have theirs in MTP/; llama.cpp
    takes none.
    """
    folder = PurePosixPath(target or "").parent
    drafters = [name for name in _of_role(files, "drafter", roles) if name != target]
    above = [name for name in drafters if PurePosixPath(name).parent in (folder, *folder.parents)]
    bits = _bits(tag or quantization_tag(target or ""))

    def rank(name: str) -> tuple[int, bool, int]:
        return -len(PurePosixPath(name).parts), tag is None or not _has_tag(name, tag), abs(_bits(quantization_tag(name)) - bits)

    return min(above or drafters, key=rank, default=None)


def split_parts(name: str) -> int:
    """Returns the number of parts of the split file that this file belongs to, by its name; 1 for a whole file."""
    part = _PART.search(PurePosixPath(name).stem)
    return int(part[2]) if part else 1


def _of_role(files: list[str], role: str, roles: Roles) -> list[str]:
    """Returns the files of this role, sorted. A split file is represented by its first part."""
    models = sorted(name for name in files if PurePosixPath(name).suffix == ".gguf" and _is_first(name) and not _is_other(name, roles))
    named = {name: roles.get(name) or ("drafter" if _words(name) & _DRAFTER_WORDS else "target") for name in models}
    if "target" not in named.values():  # a folder's name made all files drafters, so only file names are used
        named = {name: roles.get(name) or ("drafter" if _words(PurePosixPath(name).name) & _DRAFTER_WORDS else "target") for name in models}
    return [name for name in models if named[name] == role]


def _is_first(name: str) -> bool:
    part = _PART.search(PurePosixPath(name).stem)
    return part is None or int(part[1]) == 1


def _is_other(name: str, roles: Roles) -> bool:
    return roles.get(name) == "other" or (name not in roles and any(word in PurePosixPath(name).name.lower() for word in _OTHERS))


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def _has_tag(name: str, tag: str) -> bool:
    """Whether a tag is a whole word of a name: F16 is not one of x-BF16.gguf, and Q4_K is not one of x-Q4_K_M.gguf."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(tag)}(?=[-./]|$)", name, re.IGNORECASE) is not None


def _bits(tag: str | None) -> int:
    """Returns the first number in a tag, such as 4 of Q4_K_M or 16 of BF16; 0 if there is none."""
    number = re.search(r"\d+", tag or "")
    return int(number[0]) if number else 0


def quantization_tag(name: str) -> str | None:
    """Returns the quantization in a file's name, such as Q4_K_M of gemma-4-E2B-it-Q4_K_M.gguf; the last word if there is none."""
    stem = _PART.sub("", PurePosixPath(name).name.removesuffix(".gguf"))
    if found := _QUANTIZATION.findall(stem):
        return str(found[-1])
    last = _LAST_WORD.search(stem)
    return last[1] if last else None


# Names of hub repositories, with a revision or a file, and their download, which resumes after a lost connection.
#
# `hub_client` checks the hub's answers.

# The files of a checkpoint's repository that an export reads.
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "README.md")
_WITH_ASSISTANT = re.compile(r"google/gemma-4-[\w.]+(-A4B)?-it(-qat-q4_0-unquantized)?")
_QUANTIZED = re.compile(r"(google/gemma-4-[\w.]+(-A4B)?-it-qat)-(q4_0-gguf|w4a16-ct|mobile-ct|mobile-transformers)")
_SIZE = re.compile(r"gemma-4-([\w.]+?(-A4B)?)-it", re.IGNORECASE)
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@([\w.][\w./-]*))?(?::([^:]+\.gguf)|:(\w[\w-]*))?", re.ASCII)
_NAMED = 8
# The role of a GGUF file, by the architecture in its header. The third name is an early spelling.
_ROLES = {"gemma4": "target", "gemma4-assistant": "drafter", "gemma4_assistant": "drafter", "clip": "other"}
# A repository's folder in the hub's cache is named models--OWNER--NAME.
_HUB_CACHE = "models--"


# Names and sizes of files, by repository and revision.
Listings = dict[tuple[str, str | None], dict[str, int]]


@dataclass(frozen=True)
class HubName:
    """OWNER/NAME, optionally with @REVISION (a branch, tag or commit), and with :FILE, a GGUF file, or :TAG, a quantization."""

    repository: str
    revision: str | None = None
    file: str | None = None
    tag: str | None = None

    def __str__(self) -> str:
        revision, file = f"@{self.revision}" if self.revision else "", self.file or self.tag
        return f"{self.repository}{revision}" + (f":{file}" if file else "")


def hub_name(text: str) -> HubName | None:
    """Returns the parts of a hub name; None if `text` is not one."""
    match = _NAME.fullmatch(text)
    return None if match is None else HubName(*match.groups())


def own_drafter(target: str) -> str | None:
    """Returns the source of the drafter that belongs to a target, found by the target's name; None if that is not known.

    Each of Google's instruction-tuned checkpoints has an assistant, and quantized QAT releases share that of the unquantized one. In a
    repository of GGUF files, the drafter is one of the files; for a local GGUF file, it is in the same folder. Raises CheckpointError as
    `check_links` does.
    """
    path, name = Path(target), hub_name(target)
    if path.is_file():
        files = local_ggufs(path.parent)
        beside = drafter_file(files, path.name, roles=header_roles(path.parent, files))
        if beside is None:
            return None
        check_links(path.parent, [path.parent / beside])
        return str(path.parent / beside)
    if path.exists():
        return target if local_ggufs(path) else None
    if name is None:
        return None
    if quantized := _QUANTIZED.fullmatch(name.repository):
        return f"{quantized[1]}-q4_0-unquantized-assistant"
    if _WITH_ASSISTANT.fullmatch(name.repository) and not (name.file or name.tag):
        return f"{name.repository}-assistant"
    if name.file:
        return str(replace(name, file=None, tag=quantization_tag(name.file)))
    return target if name.tag or name.repository.lower().endswith("-gguf") else None


def fetched_checkpoint(origin: str) -> bool:
    """Whether a name is that of a hub repository with a checkpoint, judged by the name alone."""
    name = None if Path(origin).exists() else hub_name(origin)
    return name is not None and own_drafter(origin) != origin and not (name.file or "-qat-" in name.repository)


def local_ggufs(folder: Path) -> list[str]:
    """Returns the GGUF files in a folder; none if it is a checkpoint with safetensors."""
    if any(folder.glob("*.safetensors")):
        return []
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]


def header_roles(folder: Path, files: Iterable[str]) -> Roles:
    """Returns the role of each file by its header, without files that cannot be read or hold another model."""
    roles = {}
    for name in files:
        with contextlib.suppress(GgufError):
            if (folder / name).is_file() and (role := _ROLES.get(read_architecture(folder / name))):
                roles[name] = role
    return roles


def local_gguf(folder: Path, role: str) -> str | None:
    """Returns the GGUF file of this role in a folder; None if there is none."""
    files = local_ggufs(folder)
    return file_of_role(files, role, None, header_roles(folder, files))


def check_links(folder: Path, files: Iterable[Path]) -> None:
    """Raises CheckpointError for a file that links out of the folder, as a downloaded folder could link to any file of this machine."""
    inside = folder.resolve()
    for place in (inside, *inside.parents):  # the folder may be one for a quantization, below the revision's
        if place.parent.name == "snapshots" and place.parents[1].name.startswith(_HUB_CACHE):
            inside = place.parents[1]  # files of the hub's cache are links to blobs beside the snapshots
            break
    for path in files:
        target = Path(os.path.realpath(path))  # Path.resolve would raise for circular links
        if not target.is_relative_to(inside) or target.is_symlink():
            raise CheckpointError(f"{str(path)!r} is a link to {str(target)!r}, outside of {inside}; put the file itself into the folder")


def with_revision(text: str, revision: str | None) -> str:
    """Returns a hub name with this revision; `text` unchanged for None. Raises CheckpointError for other names, or if it has one."""
    if revision is None:
        return text
    name = hub_name(text)
    if name is None or name.revision is not None or Path(text).exists() or hub_name(f"{name.repository}@{revision}") is None:
        raise CheckpointError(f"revision {revision!r} does not fit {text}; a revision needs the name of a hub repository without one")
    return str(replace(name, revision=revision))


def fetch(name: HubName, role: str, progress: Progress | None = None, listings: Listings | None = None) -> Path:
    """Downloads what an export needs, unless it is cached. Returns the folder of a checkpoint, or a GGUF file.

    From a repository of GGUF files, it takes that of `role` ("target", "drafter"), by the rules for listings above. `listings` are those of
    `check_pair_exists`; any others are requested from the hub.

    Raises CheckpointError if huggingface_hub is missing, the hub cannot be reached, repository, revision or file do not exist, or the
    cache has no room.
    """
    with _reading(name):
        sizes = _listing(name, {} if listings is None else listings)
        file = chosen_gguf(list(sizes), name, role)
        patterns = [file] if file is not None else list(PATTERNS)
        _check_room(name, _missing_bytes(name, patterns, sizes))
        folder = _download(name, patterns, sizes, progress)
    return folder / file if file is not None else folder


def check_pair_exists(target: HubName | None, drafter: HubName | None) -> Listings:
    """Returns the listings of the pair's repositories, and requests each only once.

    None stands for a half that is not on the hub. Raises CheckpointError, before anything is downloaded, if a repository lacks the file of
    its role, or if there is no room for both.
    """
    missing, listings = 0, Listings()
    for name, role in ((target, "target"), (drafter, "drafter")):
        if name is not None:
            with _reading(name):
                sizes = _listing(name, listings)
                file = chosen_gguf(list(sizes), name, role)
                missing += _missing_bytes(name, [file] if file is not None else list(PATTERNS), sizes)
                _check_room(name, missing)
    return listings


def _listing(name: HubName, listings: Listings) -> dict[str, int]:
    place = name.repository, name.revision
    if place not in listings:
        listings[place] = listing(*place)
    return listings[place]


def chosen_gguf(files: list[str], name: HubName, role: str) -> str | None:
    """Returns the GGUF file for this role; None for a checkpoint, or if the listing is empty. Raises CheckpointError if it is missing."""
    if name.file is not None:
        if files and name.file not in files:
            raise CheckpointError(f"{name.repository} has no file {name.file}; it has {_listed(files)}")
        return _whole(name, name.file)
    ggufs = [file for file in files if file.endswith(".gguf")]
    if not ggufs or ADAPTER_NAME in files or any(file.endswith(".safetensors") for file in files):
        if name.tag is not None and files:
            raise CheckpointError(f"{name.repository} is no repository of GGUF files, so :{name.tag} names nothing in it; leave it out")
        return None
    file = file_of_role(ggufs, role, name.tag)
    if file is None:
        raise CheckpointError(_no_gguf(files, name, role))
    return _whole(name, file)


def _whole(name: HubName, file: str) -> str:
    """Returns `file`. Raises CheckpointError, before anything is downloaded, if it is a part of a split file."""
    if (parts := split_parts(file)) > 1:
        raise CheckpointError(
            f"{file} in {name.repository} is one of {parts} parts of a GGUF; name a file that is whole, or fetch the parts and join them"
            " with llama-gguf-split --merge"
        )
    return file


def _no_gguf(files: list[str], name: HubName, role: str) -> str:
    size = _SIZE.search(name.repository)
    tagged = f" of {name.tag}" if role == "target" and name.tag else ""
    assistant = f"google/gemma-4-{size[1]}-it-assistant" if size else "its assistant"
    advice = f"give {assistant} as DRAFTER" if role == "drafter" else f"name one, such as {replace(name, tag=None, file='FILE.gguf')}"
    return f"{name.repository} holds no GGUF file{tagged} for a {role} ({_listed(files)}); {advice}"


def _missing_bytes(name: HubName, patterns: list[str], sizes: dict[str, int]) -> int:
    """Returns the total size of the files that match and are not cached."""
    return sum(size for file, size in _matching(sizes, patterns).items() if not is_cached(name.repository, name.revision, file))


def _matching(sizes: dict[str, int], patterns: list[str]) -> dict[str, int]:
    return {file: size for file, size in sizes.items() if any(PurePosixPath(file).match(pattern) for pattern in patterns)}


def _check_room(name: HubName, needed: int) -> None:
    folder = cache_folder()
    while not folder.exists():
        folder = folder.parent
    if needed > (free := shutil.disk_usage(folder).free):
        raise CheckpointError(
            f"{name} needs {needed / 1e9:.1f} GB of downloads, {folder} has {free / 1e9:.1f} GB free; free some space"
            " or set HF_HOME to a larger disk"
        )


def bytes_to_fetch(name: HubName) -> int | None:
    """Returns the bytes that an export would download, by the hub's listing; None if it is unavailable. Raises CheckpointError."""
    with _reading(name):
        sizes = listing(name.repository, name.revision)
        return _missing_bytes(name, list(PATTERNS), sizes) if sizes else None


def fetch_config(name: HubName) -> Path:
    """Downloads only config.json, for a plan, and returns its folder. Raises CheckpointError."""
    with _reading(name):
        if name.file is not None:
            raise CheckpointError(f"{name} is a GGUF file; plan for its size instead, such as E2B, or for the downloaded file")
        return _download(name, ["config.json"], {}, None)


def _reading(name: HubName) -> AbstractContextManager[None]:
    """Returns `hub_errors` with the messages of a download."""
    return hub_errors(
        f"{name} is not a local folder, and huggingface_hub, which would fetch it, is not installed",
        f"{name} is not a local folder and could not be fetched from the Hugging Face hub",
        "check the name and the network and repeat the command (complete files are kept), or give a local folder",
    )


def _listed(files: list[str]) -> str:
    """Returns the names of GGUF files of language models, for a message."""
    ggufs = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file.lower())
    more = f" and {len(ggufs) - _NAMED} more" if len(ggufs) > _NAMED else ""
    return (", ".join(ggufs[:_NAMED]) or "no GGUF files") + more


def _download(name: HubName, patterns: list[str], sizes: dict[str, int], progress: Progress | None) -> Path:
    if progress is not None:
        progress.step(f"Fetch {name}", sum(_matching(sizes, patterns).values()) or None)
    return download(name.repository, name.revision, patterns, progress)
