"""What a path that is no bundle probably is, and the command that makes it runnable."""

from __future__ import annotations

import difflib
import re
import shlex
from itertools import islice
from pathlib import Path

# Folders are searched no further than this, so that an error comes at once.
_MAX_ENTRIES = 2000
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@[\w./-]+)?(?::[^:]+\.gguf)?")
_CHECKPOINT_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")


def advice(folder: Path, manifest_name: str) -> str:
    """Returns what to do about `folder`, which has no manifest; it is compared with what lies in it and beside it."""
    export = f"edge-export pair {shlex.quote(str(folder))} DRAFTER --output my-bundle"
    if folder.is_file():
        kind = "a GGUF file" if folder.suffix.lower() == ".gguf" else "a file"
        return f"it is {kind}; " + (f"make a bundle of it and its drafter with: {export}" if kind != "a file" else "give a bundle's folder")
    if not folder.exists():
        if near := _near(folder, manifest_name):
            return f"there is no such folder; did you mean {near}?"
        if _HUB_NAME.fullmatch(str(folder)):
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


def _hub_export(name: str) -> str:
    match = _HUB_NAME.fullmatch(name)
    repository = match[1] if match else name
    # A repository of GGUF files holds the drafter too; edge-export finds it, or lists the files.
    drafter = repository if name.endswith(".gguf") or repository.lower().endswith("-gguf") else f"{repository}-assistant"
    return f"edge-export pair {shlex.quote(name)} {drafter} --output {repository.rpartition('/')[2]}"


def _target_first(names: list[str]) -> list[str]:
    """The target and the drafter of a folder's GGUF files, by the words that drafters have in their names."""
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
