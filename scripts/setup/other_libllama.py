"""Puts the libraries of another wheel with llama.cpp in place of llama-cpp-python's, whose bindings and MTP symbols they must fit.

    python scripts/setup/other_libllama.py llama_cpp_py_sync-0.11739-1cpu-py3-none-manylinux2014_x86_64.whl

What differs is printed, one line each, and the exit code is then 1: structures by the declarations for cffi that the wheel has, symbols
by loading its libllama, which also tells whether this system has what it needs. Libraries that fit replace those of the environment that
runs this script, so it is meant for one of its own (try_versions.sh).
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

# What the runtime fills or reads of llama.h.
STRUCTURES = ("llama_model_params", "llama_context_params", "llama_batch")
_STRUCTURE = re.compile(r"^(?:typedef )?struct (\w+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"(\w+)(?:\[\d+\])?;")
# Loads the library as the runtime does, with the module for the MTP symbols.
_LOAD = "from edge_runtime.backends.llama.loader import llama_library; llama_library()"


def declared(text: str) -> dict[str, list[str]]:
    """Returns the names of the fields of each structure that C declarations have, in order."""
    return {name: _FIELD.findall(body) for name, body in _STRUCTURE.findall(text)}


def differences(theirs: dict[str, list[str]], ours: dict[str, list[str]]) -> list[str]:
    """Returns a sentence for each of our structures that has other fields there, or the same in another order."""
    found = []
    for name, fields in ours.items():
        there = theirs.get(name)
        if there is None:
            found.append(f"{name} is not declared")
        elif there != fields:
            more, less = [f for f in there if f not in fields], [f for f in fields if f not in there]
            names = [f"{count} {', '.join(which)}" for count, which in (("also has", more), ("lacks", less)) if which]
            found.append(f"{name} {' and '.join(names) or 'has its fields in another order'}")
    return found


def bound(api: Any) -> dict[str, list[str]]:
    """Returns the fields of the structures by llama-cpp-python's bindings."""
    return {name: [field[0] for field in getattr(api, name)._fields_] for name in STRUCTURES}


def _replace(libraries: Path, wheel: Path) -> None:
    """Replaces all libraries of a folder by those of an unpacked wheel; a name ends where the number of its interface begins."""
    shutil.rmtree(libraries)
    libraries.mkdir()
    for path in sorted(wheel.glob("*/*")):
        if re.search(r"\.(so|dylib|dll)(\.\d+)*$", path.name):
            shutil.copy(path, libraries / path.name)
            plain = libraries / re.sub(r"(\.so)\.\d+$", r"\1", path.name)
            if not plain.exists():
                plain.symlink_to(path.name)


@click.command()
@click.argument("wheel", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(wheel: Path) -> None:
    """Put the libraries of WHEEL in place of llama-cpp-python's."""
    api = importlib.import_module("llama_cpp.llama_cpp")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        zipfile.ZipFile(wheel).extractall(folder)
        text = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*/_cffi_bindings.py"))
        found = differences(declared(text), bound(api))
        library = next(folder.glob("*/*libllama.*"), None) or next(folder.glob("*/llama.dll"), None)
        if library is None:
            raise click.ClickException(f"{wheel.name} has no libllama")
        loading = subprocess.run(
            [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r})"], capture_output=True, text=True, check=False
        )
        if loading.returncode:
            found.append(f"{library.name} does not load here: {loading.stderr.strip().splitlines()[-1].replace(str(folder), '')}")
        if not found:
            _replace(Path(api._base_path), folder)
            loading = subprocess.run([sys.executable, "-c", _LOAD], capture_output=True, text=True, check=False)
            if loading.returncode:
                found.append(loading.stderr.strip().splitlines()[-1])
    for sentence in found:
        click.echo(sentence)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
