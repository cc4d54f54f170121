"""Which GGUF files of a listing belong together: the target that a tag names, and its drafter.

The rules are llama.cpp's (common/download.cpp: find_best_model, find_best_sibling), so that a name means the same files there and here.
Beyond them: what a file is, its header says where it is at hand, else its name in any case; and a tag is a whole word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from types import MappingProxyType

# What the headers of files say that are at hand: "target", "drafter" or "other", by name.
Roles = Mapping[str, str]
_UNKNOWN: Roles = MappingProxyType({})
_DRAFTER_WORDS = frozenset(("mtp", "assistant", "draft", "drafter"))
_OTHERS = ("mmproj", "imatrix", "eagle3-", "dflash-", "dspark-")
# Taken in this order where no tag is given.
_DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
# The last word that is a quantization's name, else the last word.
_QUANTIZATION = re.compile(r"(?<![A-Za-z0-9])(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4)(?=[-.]|$)", re.IGNORECASE | re.ASCII)
_LAST_WORD = re.compile(r"[-.](\w+)$", re.ASCII)


def file_of_role(files: list[str], role: str, tag: str | None, roles: Roles = _UNKNOWN) -> str | None:
    """Returns the target, or the drafter of that target; None if there is none."""
    target = target_file(files, tag, roles)
    return target if role == "target" else drafter_file(files, target, tag, roles)


def target_file(files: list[str], tag: str | None = None, roles: Roles = _UNKNOWN) -> str | None:
    """Returns the target of a tag such as Q4_0; without one Q4_K_M, else Q8_0, else the first. None if there is none."""
    targets = _of_role(files, "target", roles)
    for asked in (tag,) if tag else _DEFAULT_TAGS:
        # In the file's name, else in that of its folder.
        for text in (lambda name: PurePosixPath(name).name, str):
            if named := next((name for name in targets if _has_tag(text(name), asked)), None):
                return named
    return None if tag else next(iter(targets), None)


def drafter_file(files: list[str], target: str | None, tag: str | None = None, roles: Roles = _UNKNOWN) -> str | None:
    """Returns the drafter for a target of the same listing; None if there is none.

    It lies in the target's folder or in one above it, the deepest counts; then one with the tag in its name, then the nearest bits.
    llama.cpp looks no further; here one in another folder is better than none, as some repositories have theirs in MTP/.
    """
    folder = PurePosixPath(target or "").parent
    drafters = [name for name in _of_role(files, "drafter", roles) if name != target]
    above = [name for name in drafters if PurePosixPath(name).parent in (folder, *folder.parents)]
    bits = _bits(tag or quantization_tag(target or ""))

    def rank(name: str) -> tuple[int, bool, int]:
        return -len(PurePosixPath(name).parts), tag is None or not _has_tag(name, tag), abs(_bits(quantization_tag(name)) - bits)

    return min(above or drafters, key=rank, default=None)


def split_parts(name: str) -> int:
    """Returns of how many parts a file is one, by its name; 1 for a whole file."""
    part = _PART.search(PurePosixPath(name).stem)
    return int(part[2]) if part else 1


def _of_role(files: list[str], role: str, roles: Roles) -> list[str]:
    """The files of this role, sorted; of a split file the first part."""
    models = sorted(name for name in files if PurePosixPath(name).suffix == ".gguf" and _is_first(name) and not _is_other(name, roles))
    named = {name: roles.get(name) or ("drafter" if _words(name) & _DRAFTER_WORDS else "target") for name in models}
    if "target" not in named.values():  # a folder's name speaks of all that is in it
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
    """Whether a tag is a word of a name: F16 is not in x-BF16.gguf, nor Q4_K in x-Q4_K_M.gguf."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(tag)}(?=[-./]|$)", name, re.IGNORECASE) is not None


def _bits(tag: str | None) -> int:
    """The first number of a tag: 4 of Q4_K_M, 16 of BF16; 0 for none."""
    number = re.search(r"\d+", tag or "")
    return int(number[0]) if number else 0


def quantization_tag(name: str) -> str | None:
    """The quantization in a file's name: Q4_K_M of gemma-4-E2B-it-Q4_K_M.gguf; its last word if none is named."""
    stem = _PART.sub("", PurePosixPath(name).name.removesuffix(".gguf"))
    if found := _QUANTIZATION.findall(stem):
        return str(found[-1])
    last = _LAST_WORD.search(stem)
    return last[1] if last else None
