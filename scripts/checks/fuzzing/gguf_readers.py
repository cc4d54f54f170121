"""Readers of whole GGUF models: hostile headers before sound weights, opened by llama.cpp where our own checks let them through."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edge_runtime.bundle.manifest import MEDIA_ENCODER
from edge_runtime.media.image import Image
from fuzzing.model_readers import TEXTS, opened_bundle
from fuzzing.readers import Read, Reader, data_start

_PROMPT = (2, 5, 6, 7)


def gguf_places(data: bytes) -> list[tuple[int, int]]:
    """Returns where in a sound GGUF header its keys and tensors lie; an array, be it a vocabulary, is one place, and its length another."""
    places, at = [(0, 24)], 24
    tensors, keys = struct.unpack_from("<QQ", data, 8)
    widths = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def string(at: int) -> int:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]

    for _ in range(keys):
        begin, at = at, string(at)
        (kind,) = struct.unpack_from("<I", data, at)
        at += 4
        if kind == 8:
            at = string(at)
        elif kind == 9:
            inner, count = struct.unpack_from("<IQ", data, at)
            at += 12
            places.append((begin, at))
            begin = at
            for _ in range(count):
                at = string(at) if inner == 8 else at + widths[inner]
        else:
            at += widths[kind]
        places.append((begin, at))
    for _ in range(tensors):
        begin, at = at, string(at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        at += 4 + 8 * dimensions + 12
        places.append((begin, at))
    return places


def _file_with_header(folder: Path, source: Path) -> Callable[[bytes], Path]:
    """Returns what puts a header before the source's data, which stays where it was."""
    data = source.read_bytes()
    start = data_start(source)
    path = folder / source.name
    path.write_bytes(data)

    def put(header: bytes) -> Path:
        with path.open("r+b") as file:
            file.write(header[:start].ljust(start, b"\0"))
        return path

    return put


def _target_file(bundle: Path) -> Path:
    return opened_bundle(bundle).path("target", "gguf")


def _drafter_file(bundle: Path) -> Path:
    return opened_bundle(bundle).path("drafter", "gguf")


def _body_file(bundle: Path) -> Path:
    return opened_bundle(bundle).path("drafter_body", "gguf")


def _model(folder: Path, bundle: Path | None) -> Read:
    """The target, opened and used for texts and one token."""
    from edge_runtime.backends.llama.context import LlamaOptions
    from edge_runtime.backends.llama.target import LlamaTarget

    assert bundle is not None
    put = _file_with_header(folder, _target_file(bundle))
    options = LlamaOptions(context=64, threads=1, batch=64, use_extra_bufts=False)

    def read(data: bytes) -> None:
        with LlamaTarget(put(data), options) as target:
            for text in TEXTS:
                for token in target.vocabulary.encode(text):
                    target.vocabulary.piece(token, special=True)
            target.verify([1])

    return read


def _drafter(folder: Path, bundle: Path | None) -> Read:
    """The dense drafter on a sound target's cache, opened and used for a draft."""
    from edge_runtime.backends.llama.context import LlamaOptions
    from edge_runtime.backends.llama.drafter import LlamaDrafter
    from edge_runtime.backends.llama.target import LlamaTarget

    assert bundle is not None
    put = _file_with_header(folder, _drafter_file(bundle))
    options = LlamaOptions(context=64, threads=1, batch=64, use_extra_bufts=False)
    target = LlamaTarget(_target_file(bundle), options)
    target.verify(list(_PROMPT))

    def read(data: bytes) -> None:
        with LlamaDrafter(put(data), target, options) as drafter:
            drafter.draft(8, 3)

    return read


def _body(folder: Path, bundle: Path | None) -> Read:
    """The split drafter's body with its sound head, likewise."""
    from edge_runtime.backends.llama.context import LlamaOptions
    from edge_runtime.backends.llama.split_drafter import LlamaSplitDrafter
    from edge_runtime.backends.llama.target import LlamaTarget

    assert bundle is not None
    put = _file_with_header(folder, _body_file(bundle))
    head, target_file = (Path(shutil.copy(path, folder)) for path in (opened_bundle(bundle).path("drafter_head"), _target_file(bundle)))
    options = LlamaOptions(context=64, threads=1, batch=64, use_extra_bufts=False)
    target = LlamaTarget(target_file, options)
    target.verify(list(_PROMPT))

    def read(data: bytes) -> None:
        with LlamaSplitDrafter(put(data), head, target, target_file, options) as drafter:
            drafter.draft(8, 3)

    return read


def _encoder_file(bundle: Path) -> Path:
    return opened_bundle(bundle).path(MEDIA_ENCODER, "gguf")


def _encoder(folder: Path, bundle: Path | None) -> Read:
    """The encoder of images on a sound target, opened and used for an image."""
    from edge_runtime.backends.llama.context import LlamaOptions
    from edge_runtime.backends.llama.target import LlamaTarget

    assert bundle is not None
    put = _file_with_header(folder, _encoder_file(bundle))
    image = Image(np.random.default_rng(1).integers(0, 256, (96, 144, 3), dtype=np.uint8))
    shared = LlamaTarget(_target_file(bundle), LlamaOptions(context=64, threads=1, batch=64, use_extra_bufts=False)).shared

    def read(data: bytes) -> None:
        shared.open_encoder(put(data)).encode(image)
        shared.close_encoder()

    return read


READERS = (
    Reader(name="gguf-encoder", make=_encoder, needs_bundle=True, needs_encoder=True, header_of=_encoder_file, focus=gguf_places),
    Reader(name="gguf-model", make=_model, needs_bundle=True, header_of=_target_file, focus=gguf_places),
    Reader(name="gguf-drafter", make=_drafter, needs_bundle=True, header_of=_drafter_file, focus=gguf_places),
    Reader(name="gguf-body", make=_body, needs_bundle=True, header_of=_body_file, focus=gguf_places),
)
