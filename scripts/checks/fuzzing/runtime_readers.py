"""The runtime's readers of files that need no model, decoders of images and sound among them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np

from edge_runtime.backends.onnx.graph_memory import check_graph_memory
from edge_runtime.backends.onnx.static_target import Embedding
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.gguf_header import GgufError, read_gguf_header
from edge_runtime.bundle.manifest import with_hash
from edge_runtime.bundle.onnx_file import read_graph
from edge_runtime.bundle.onnx_graph import check_onnx
from edge_runtime.calibration.first_use import COSTS
from edge_runtime.config.settings import read_config
from edge_runtime.drafting.energy_objective import read_phase_power
from edge_runtime.media.decoder import decode_image, decode_sound
from edge_runtime.media.encoder_inputs import kind_of
from edge_runtime.server.apis.ollama import read_ollama_chat
from edge_runtime.server.apis.responses_api import read_response
from edge_runtime.server.errors import ApiError
from edge_runtime.server.http.body import parse_json
from edge_runtime.server.requests.completions import read_chat, read_completion
from edge_runtime.session import chat
from edge_runtime.session.prompt_cache import SegmentFile
from fuzzing.readers import CORPUS, OWN_ERRORS, PARSED, Read, Reader, corpus, from_file

# Content of the files named in the manifests of the corpus.
DUMMIES = {
    "target.gguf": b"t" * 11,
    "drafter.gguf": b"d" * 7,
    "tokenizer.json": b"{}",
    "weights.onnx_data": b"w" * 64,
    "target.onnx": b"g" * 5,
}
# Pixels and samples take more bytes than compressed files; the limits of encoder_inputs.py bound them.
_DECODED = 2.0e6
_BUDGET = 70


def _manifest(folder: Path, _: object) -> Read:
    bundle = folder / "bundle"
    bundle.mkdir()
    for name, content in DUMMIES.items():
        (bundle / name).write_bytes(content)

    def read(data: bytes) -> None:
        (bundle / "manifest.json").write_bytes(hashed(data))
        open_bundle(bundle, check="none")  # hashing is not what is tried here, and would take most of the time

    return read


def hashed(data: bytes) -> bytes:
    """Gives what is still JSON the hash it should have: nearly all inputs would be refused by it, and nothing behind it be tried."""
    try:
        record = json.loads(data)
        return with_hash(record).encode() if isinstance(record, dict) else data
    except (ValueError, RecursionError):
        return data


def make_weights(folder: Path) -> None:
    """Writes the weight files of the corpus's graphs, as sparse files."""
    for name, size in json.loads((CORPUS / "onnx-data.json").read_text()).items():
        with (folder / name).open("wb") as file:
            file.truncate(size)


def _onnx(folder: Path, _: object) -> Read:
    make_weights(folder)
    path = folder / "model.onnx"
    # Sizes that are known at run time only.
    shapes = {name.decode(): (4,) * 4 for seed in corpus("onnx") for name in read_graph(seed).inputs}

    def read(data: bytes) -> None:
        path.write_bytes(data)
        check_onnx(path)
        check_graph_memory(path, shapes)

    return read


def _state(folder: Path, _: object) -> Read:
    path, sizes = folder / "state", (16, 8)
    facts = {"bundle": "bundle", "engine": "llama", "kv_type": "f16", "rows": "16+8", "kernels": "kernels"}

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with SegmentFile(path, facts, sizes) as file:
            file.read_full(np.empty((file.header.tokens, sizes[0]), np.uint8))
            file.read_sliding(np.empty((file.header.sliding, sizes[1]), np.uint8))

    return read


def _request(_: Path, __: object) -> Read:
    def read(data: bytes) -> None:
        body = parse_json(data)
        read = read_response if "input" in body else read_ollama_chat if "options" in body else read_chat
        (read_completion if "prompt" in body else read)(body)

    return read


def _numpy_table(path: Path) -> None:
    table = Embedding(path, 8, 16, 1.0)
    table.lookup(np.array([0, 7]), np.zeros((1, 2, 16), np.float32))


def _image(_: Path, __: object) -> Read:
    def read(data: bytes) -> None:
        image = decode_image(data, _BUDGET)
        assert 0 < image.rows <= _BUDGET

    _import("PIL.Image", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.WebPImagePlugin")
    return read


def _sound(_: Path, __: object) -> Read:
    def read(data: bytes) -> None:
        if kind_of(data) == "sound":
            decode_sound(data).mel_frames()

    _import("soundfile")
    return read


def _import(*names: str) -> None:
    """Libraries are imported before the campaign forbids it."""
    for name in names:
        importlib.import_module(name)


READERS = (
    Reader(name="manifest", make=_manifest, structured=True, memory_factor=PARSED),
    Reader(name="config", make=from_file("config.yaml", read_config), structured=True, memory_factor=PARSED * 8),
    Reader(name="gguf-header", make=from_file("model.gguf", read_gguf_header), errors=(GgufError,), corpus="gguf"),
    Reader(name="onnx-header", make=_onnx, corpus="onnx", memory_factor=PARSED),
    Reader(name="npy-table", make=from_file("table.npy", _numpy_table)),
    Reader(
        name="chat-file",
        make=from_file("chat.json", chat.load_chat),
        structured=True,
        memory_factor=PARSED,
    ),
    Reader(name="state-file", make=_state, memory_factor=8.0),
    Reader(name="watts-file", make=from_file("watts.json", read_phase_power), structured=True, memory_factor=PARSED),
    Reader(
        name="remembered",
        make=from_file("measured.json", lambda path: [*COSTS.kept(path)]),
        structured=True,
        memory_factor=PARSED,
    ),
    Reader(name="api-request", make=_request, structured=True, memory_factor=PARSED, errors=(*OWN_ERRORS, ApiError)),
    Reader(name="image", make=_image, memory_factor=_DECODED),
    Reader(name="sound", make=_sound, memory_factor=_DECODED),
)
