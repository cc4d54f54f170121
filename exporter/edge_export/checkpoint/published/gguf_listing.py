"""Which GGUF files of a listing belong together: the target that a tag names, and its drafter.

The rules are llama.cpp's (common/download.cpp: find_best_model, find_best_sibling), so that a name means the
same files there and here. An assistant in a file's name is a drafter too.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

_DRAFTER = "mtp-"
_OTHERS = ("mmproj", "imatrix", "eagle3-", "dflash-", "dspark-")
# Taken in this order where no tag is given.
_DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_TAG = re.compile(r"[-.](\w+)$", re.ASCII)


def file_of_role(files: list[str], role: str, tag: str | None) -> str | None:
    """Returns the target, or the drafter of that target; None if there is none."""
    target = target_file(files, tag)
    return target if role == "target" else drafter_file(files, target, tag)


def target_file(files: list[str], tag: str | None = None) -> str | None:
    """Returns the target of a tag such as Q4_0; without one Q4_K_M, else Q8_0, else the first. None if there is none."""
    targets = [name for name in sorted(files) if _is_target(name)]
    for asked in (tag,) if tag else _DEFAULT_TAGS:
        pattern = re.compile(re.escape(asked) + "[.-]", re.IGNORECASE)
        if named := next((name for name in targets if pattern.search(name)), None):
            return named
    return None if tag else next(iter(targets), None)


def drafter_file(files: list[str], target: str | None, tag: str | None = None) -> str | None:
    """Returns the drafter for a target of the same listing; None if there is none.

    It lies in the target's folder or in one above it, the deepest counts; then one with the tag in its name, then the nearest bits.
    llama.cpp looks no further; here one in another folder is better than none, as some repositories have theirs in MTP/.
    """
    folder = PurePosixPath(target or "").parent
    drafters = [name for name in sorted(files) if name.endswith(".gguf") and is_drafter(name)]
    above = [name for name in drafters if PurePosixPath(name).parent in (folder, *folder.parents)]
    bits = _bits(f"-{tag}" if tag else (target or "").removesuffix(".gguf"))

    def rank(name: str) -> tuple[int, bool, int]:
        exact = tag is not None and f"-{tag.upper()}." in name.upper()
        return -len(PurePosixPath(name).parts), not exact, abs(_bits(name.removesuffix(".gguf")) - bits)

    return min(above or drafters, key=rank, default=None)


def is_drafter(name: str) -> bool:
    """Whether a file is called a drafter; some call it an assistant."""
    return _DRAFTER in name or "assistant" in name.lower()


def _is_target(name: str) -> bool:
    path = PurePosixPath(name)
    part = _PART.search(path.stem)
    return (
        path.suffix == ".gguf"
        and not is_drafter(name)
        and not any(word in path.name for word in _OTHERS)
        and (part is None or int(part[1]) == 1)
    )


def _bits(stem: str) -> int:
    """The first number of a file's tag: 4 of -Q4_K_M, 16 of -BF16; 0 for none."""
    number = re.search(r"\d+", quantization_tag(f"{stem}.gguf") or "")
    return int(number[0]) if number else 0


def quantization_tag(name: str) -> str | None:
    """The last part of a file's name: Q4_K_M of gemma-4-E2B-it-Q4_K_M.gguf."""
    tag = _TAG.search(_PART.sub("", name.removesuffix(".gguf")))
    return tag[1] if tag else None
