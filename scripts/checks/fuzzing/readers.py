"""A fuzzed reader of outside input: its corpus, its errors, and how it is called."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edge_devices.errors import DeviceError
from edge_export.errors import ExportError
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.bundle.gguf_header import read_gguf_header
from edge_runtime.errors import EdgeRuntimeError

CORPUS = Path(__file__).parents[3] / "tests" / "fuzz" / "corpus"
OWN_ERRORS: tuple[type[Exception], ...] = (EdgeRuntimeError, ExportError, DeviceError)
# JSON and YAML become objects that take many times the bytes they came from; size limits bound these readers.
PARSED = 60.0

Read = Callable[[bytes], None]
# What a bundle has: GGUF files, these and an encoder of images, or ONNX graphs with an int8 drafter.
Needs = Literal["gguf", "encoder", "graphs"]
ByMeaning = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A reader ready for inputs: `read` takes one; all files are in `folder`. `beside`: bytes of the file that are not part of an input."""

    reader: Reader
    folder: Path
    seeds: Sequence[bytes]
    read: Read
    focus: Sequence[tuple[int, int]]
    beside: int


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One reader. `make` returns its read function; it gets an empty folder, and an exported bundle if it `needs` one.

    `memory_factor`: bytes it may allocate per byte of input, plus a fixed slack. `guarded`: it may open no file outside its folder and run
    no code; jinja2, which compiles templates to Python, is not guarded. `header_of`: the GGUF file whose header is the only valid input.
    `by_meaning` makes most inputs.
    """

    name: str
    make: Callable[[Path, Any], Read]
    structured: bool = False
    memory_factor: float = 2.0
    needs: Needs | None = None
    guarded: bool = True
    corpus: str | None = None
    seeds: Callable[[Bundle], Sequence[bytes]] | None = None
    header_of: Callable[[Bundle], Path] | None = None
    focus: Callable[[bytes], Sequence[tuple[int, int]]] | None = None
    by_meaning: ByMeaning | None = None
    errors: tuple[type[Exception], ...] = OWN_ERRORS

    def open(self, folder: Path, bundle: Path | None) -> Opened:
        """Makes the folder and reads the corpus."""
        folder.mkdir(parents=True)
        if self.needs and bundle is None:
            raise ValueError(f"{self.name} needs an exported bundle")
        opened = open_bundle(bundle) if self.needs and bundle else None
        seeds, beside = self._seeds(opened)
        focus = self.focus(seeds[0]) if self.focus else ()
        return Opened(reader=self, folder=folder, seeds=seeds, read=self.make(folder, opened), focus=focus, beside=beside)

    def _seeds(self, bundle: Bundle | None) -> tuple[Sequence[bytes], int]:
        if self.header_of and bundle:
            whole = (path := self.header_of(bundle)).read_bytes()
            start = data_start(path)
            return [whole[:start]], len(whole) - start
        return self.seeds(bundle) if self.seeds and bundle else corpus(self.corpus or self.name), 0


def data_start(path: Path) -> int:
    """Returns the offset of the first tensor's data in a valid GGUF file."""
    return min(tensor.offset for tensor in read_gguf_header(path).tensors)


def corpus(name: str) -> list[bytes]:
    """Returns the corpus of a reader, in the order of the file names."""
    files = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    if not files:
        raise ValueError(f"{CORPUS / name} is empty")
    return files


def from_file(name: str, read: Callable[[Path], object]) -> Callable[[Path, Any], Read]:
    """Returns a `make` function for a reader that takes each input as a file of this name."""

    def make(folder: Path, _: object) -> Read:
        path = folder / name

        def read_input(data: bytes) -> None:
            path.write_bytes(data)
            read(path)

        return read_input

    return make
