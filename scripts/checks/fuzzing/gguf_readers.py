"""Readers of whole GGUF models: hostile headers before sound weights, and hostile weights behind a sound header.

llama.cpp opens them where our own checks let them through, and multiplies with the row kernels.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import struct
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np

from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.drafter import LlamaDrafter, LlamaKernelDrafter
from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.gguf_header import TENSOR_TYPES, GgufHeader, read_gguf_header
from edge_runtime.bundle.manifest import MEDIA_ENCODER
from edge_runtime.media.encoder_inputs import Image
from fuzzing.model_readers import TEXTS
from fuzzing.readers import Read, Reader, data_start

_PROMPT = (2, 5, 6, 7)
# One change of weights: tensor, first block, how many blocks, the byte in each, and the bytes that are written there, at most 8.
_CHANGE = struct.Struct("<HIHBB8s")
_HALVES = (0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0x0001, 0x8000)
_FLOATS = (float("inf"), float("nan"), 3.4e38, -3.4e38, 1e-45, -0.0)


_packing: list[bool] = []


def pack_by_row_kernels() -> None:
    """Has the readers pack weights by the row kernels, and by nothing else: AMX ends the process where a machine only claims it.

    For a process that has loaded no model yet: ggml keeps the list of what packs from then on.
    """
    library = llama_library()
    if library.row_kernels is not None:
        types = library.api._lib._Z39ggml_backend_cpu_get_extra_buffer_typesv
        types.restype = ctypes.POINTER(ctypes.c_void_p * 3)
        vector = types().contents
        vector[1] = (vector[0] or 0) + ctypes.sizeof(ctypes.c_void_p)  # the kernels' own type is the first
        _packing.append(True)


def _options() -> LlamaOptions:
    return LlamaOptions(context=64, threads=1, batch=64, use_extra_bufts=bool(_packing))


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


def _target_file(bundle: Bundle) -> Path:
    return bundle.path("target", "gguf")


def _drafter_file(bundle: Bundle) -> Path:
    return bundle.path("drafter", "gguf")


def _model(folder: Path, bundle: Bundle) -> Read:
    """The target, opened and used for texts and one token."""
    put = _file_with_header(folder, _target_file(bundle))

    def read(data: bytes) -> None:
        with LlamaTarget(put(data), _options()) as target:
            for text in TEXTS:
                for token in target.vocabulary.encode(text):
                    target.vocabulary.piece(token, special=True)
            target.verify([1])
            target.verify([1, 2, 3])

    return read


def _drafter(folder: Path, bundle: Bundle) -> Read:
    """The drafters with the dense head on a sound target's cache, opened and used for a draft: the kernels' own, then llama.cpp's."""
    put, target_file = _file_with_header(folder, _drafter_file(bundle)), Path(shutil.copy(_target_file(bundle), folder))
    target = LlamaTarget(target_file, _options())
    target.verify(list(_PROMPT))

    def read(data: bytes) -> None:
        path = put(data)
        with suppress(ValueError), closing(LlamaKernelDrafter(path, None, target, target_file)) as own:
            own.draft(8, 3)
        with LlamaDrafter(path, target, _options()) as drafter:
            drafter.draft(8, 3)

    return read


def _encoder_file(bundle: Bundle) -> Path:
    return bundle.path(MEDIA_ENCODER, "gguf")


def _encoder(folder: Path, bundle: Bundle) -> Read:
    """The encoder of images on a sound target, opened and used for an image."""
    put = _file_with_header(folder, _encoder_file(bundle))
    image = Image(np.random.default_rng(1).integers(0, 256, (96, 144, 3), dtype=np.uint8))
    shared = LlamaTarget(_target_file(bundle), _options()).shared

    def read(data: bytes) -> None:
        shared.open_encoder(put(data)).encode(image)
        shared.close_encoder()

    return read


def _weights(folder: Path, bundle: Bundle) -> Read:
    """Target and drafter with changed weights: verifies of one row and of several, and a draft. An input is a list of _CHANGE."""
    sources = _target_file(bundle), _drafter_file(bundle)
    headers, originals = [read_gguf_header(path) for path in sources], [path.read_bytes() for path in sources]
    paths = [folder / path.name for path in sources]

    def read(data: bytes) -> None:
        changes = [_CHANGE.unpack_from(data, at) for at in range(0, len(data) - _CHANGE.size + 1, _CHANGE.size)]
        for path, header, original in zip(paths, headers, originals, strict=True):
            path.write_bytes(_changed_weights(header, original, changes))
        with LlamaTarget(paths[0], _options()) as target, LlamaDrafter(paths[1], target, _options()) as drafter:
            target.verify(list(_PROMPT))
            target.verify([1])
            drafter.draft(8, 3)

    return read


def _changed_weights(header: GgufHeader, original: bytes, changes: Sequence[tuple[int, int, int, int, int, bytes]]) -> bytes:
    data = bytearray(original)
    for tensor, first, count, place, width, value in changes:
        info = header.tensors[tensor % len(header.tensors)]
        size = TENSOR_TYPES[info.type].bytes
        blocks = np.frombuffer(data, np.uint8, info.bytes, info.offset).reshape(-1, size)
        to = blocks[first % len(blocks) :][:count, place % size :][:, : width % 8 + 1]
        to[:] = np.frombuffer(value, np.uint8)[: to.shape[1]]
    return bytes(data)


def _weight_seeds(_: Bundle) -> Sequence[bytes]:
    """Changes of scales: those of a block of ggml are halves at its beginning or its end, those of norms are floats."""
    halves = [(place, struct.pack("<H", half)) for half in _HALVES for place in (0, 2, 208)]
    floats = [(0, struct.pack("<f", number)) for number in _FLOATS]
    changes = [_CHANGE.pack(7 * i, 11 * i, 1 + 99 * (i % 3), *_of(*pair)) for i, pair in enumerate([*halves, *floats])]
    return [b"".join(changes[at : at + 3]) for at in range(0, len(changes), 3)]


def _of(place: int, value: bytes) -> tuple[int, int, bytes]:
    return place, len(value) - 1, value


READERS = (
    Reader(name="gguf-encoder", make=_encoder, needs="encoder", header_of=_encoder_file, focus=gguf_places),
    Reader(name="gguf-model", make=_model, needs="gguf", header_of=_target_file, focus=gguf_places),
    Reader(name="gguf-drafter", make=_drafter, needs="gguf", header_of=_drafter_file, focus=gguf_places),
    Reader(name="gguf-weights", make=_weights, needs="gguf", seeds=_weight_seeds, memory_factor=math.inf),
)
