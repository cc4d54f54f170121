"""Memory that is counted before anything is loaded: of weights, caches and encoders, against limits, the machine and its address space."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.gguf_header import KV_TYPES, check_kv_type, row_bytes
from edge_runtime.bundle.manifest import (
    AUDIO_ENCODER,
    MEDIA_ENCODER,
    VISION_ENCODER,
    BundleFile,
    LayerCache,
    Manifest,
    MediaInputs,
    MediaTokens,
    VisionSize,
)
from edge_runtime.errors import ConfigError, RequestError
from edge_runtime.planning.memory import (
    EncoderMemory,
    MemoryPlan,
    MemoryRequest,
    MemoryRoom,
    check_memory,
    check_memory_without_copies,
    encoder_activation_bytes,
    encoder_weight_bytes,
    largest_context,
    memory_bytes,
    memory_plan,
    smaller_kv_type,
)
from edge_runtime.session.open import open_session
from scripted import MANIFEST
from tiny_media import noise, picture

SLIDING = LayerCache(kv_heads=1, head_dim=64, dtype="f16", capacity=256, window=128, owner_layers=(0, 1, 2))
FULL = LayerCache(kv_heads=2, head_dim=128, dtype="f16", capacity=1024, window=None, owner_layers=(3,))
MEMBER = replace(MANIFEST, cache_layout=replace(MANIFEST.cache_layout, sliding=SLIDING, full=FULL))
# Opens a bundle in a process of its own and says what llama.cpp allocated, by name, and how large the process got.
MEASURE = """
import json, re, sys
from pathlib import Path
from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.pair import open_pair
from edge_runtime.backends.llama.loader import llama_library
target, drafter, kv_type, context, sequences = sys.argv[1:]
log, sizes = llama_library().log, {}
add = log.add
def watch(level, text):
    if found := re.search(r"(\\w+) buffer size = *([\\d.]+) MiB", text):
        sizes[found[1]] = sizes.get(found[1], 0) + float(found[2]) * 2**20
    add(level, text)
log.add = watch
options = LlamaOptions(context=int(context), threads=1, kv_type=kv_type, sequences=int(sequences))
opened, assistant = open_pair(Path(target), Path(drafter), options)
opened.prefill([300 + i % 3000 for i in range(600)])
opened.verify(list(range(300, 313)))
assistant.draft(5, 3)
status = Path("/proc/self/status")
# Not getrusage: its peak begins with that of the process that started this one.
peak = re.search(r"VmHWM:\\s*(\\d+) kB", status.read_text()) if status.is_file() else None
print(json.dumps({**sizes, "peak": int(peak[1]) * 1024 if peak else None}))
"""


def request(**changes: Any) -> MemoryRequest:
    loaded = {"context": 1024, "kv_type": "f16", "sequences": 1, "batch": 512, "verify_rows": 13, "drafter": "dense"}
    return MemoryRequest(**{**loaded, "repack": True, "gives_back": False, **changes})


def test_a_row_takes_what_ggml_gives_it() -> None:
    assert [row_bytes(FULL, kind) for kind in KV_TYPES] == [2 * 256 * 2, 2 * 256 * 34 // 32, 2 * 256 * 18 // 32]


def test_heads_that_blocks_do_not_divide_are_refused() -> None:
    layout = replace(MEMBER.cache_layout, sliding=replace(SLIDING, head_dim=80))
    assert check_kv_type(layout, "f16") == "f16"
    with pytest.raises(RequestError, match="q8_0 stores 32 values together, but the sliding heads have 80, not a multiple; choose f16"):
        check_kv_type(layout, "q8_0")
    with pytest.raises(RequestError, match="KV type 'q5_1' is unknown; choose one of f16, q8_0, q4_0"):
        check_kv_type(layout, "q5_1")


def test_sliding_layers_hold_windows_and_a_batch_only() -> None:
    def rows(context: int, sequences: int) -> int:
        full = replace(MEMBER.cache_layout, full=replace(FULL, owner_layers=()))
        return memory_plan(replace(MEMBER, cache_layout=full), request(context=context, sequences=sequences)).cache // (256 * 3)

    assert [rows(c, n) for c, n in [(100, 1), (1024, 1), (4096, 1), (4096, 4), (300, 2)]] == [256, 768, 768, 1024, 768]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2 * 10**9),
        ("512 MiB", 512 << 20),
        (123456, 123456),
        ("100kb", 100000),
        *((text, None) for text in ("1.5g", "1e9", "0", "-1GB", "", "9" * 40, "inf")),
    ],
)
def test_amounts_of_memory(text: str | int, size: int | None) -> None:
    if size is not None:
        assert memory_bytes(text) == size
        return
    with pytest.raises(ConfigError, match=r"the memory limit is .*; write a number of bytes"):
        memory_bytes(text)


def test_a_refusal_names_what_fits() -> None:
    asked = request(context=65536)
    fits = memory_plan(MEMBER, replace(asked, context=20000)).reserved
    with pytest.raises(RequestError) as caught:
        check_memory(MEMBER, asked, MemoryRoom(limit=fits))
    context = int(re.search(r"a context of at most (\d+)", str(caught.value))[1])  # type: ignore[index]
    assert context == 20224  # 20000 in steps of 256
    assert memory_plan(MEMBER, replace(asked, context=context)).reserved <= fits
    assert memory_plan(MEMBER, replace(asked, context=context + 1)).reserved > fits
    assert "but the limit is" in str(caught.value)


def test_a_smaller_kv_type_is_named_where_it_helps() -> None:
    asked = request(context=65536)
    fits = memory_plan(MEMBER, replace(asked, kv_type="q8_0")).reserved
    assert smaller_kv_type(MEMBER, asked, lambda plan: plan.reserved <= fits) == "q8_0"
    with pytest.raises(RequestError, match=r"or KV type q8_0$"):
        check_memory(MEMBER, asked, MemoryRoom(limit=fits))
    assert largest_context(MEMBER, asked, lambda plan: plan.total <= 1000) is None
    with pytest.raises(RequestError, match="use a smaller bundle"):
        check_memory(MEMBER, asked, MemoryRoom(limit=1000))


def test_mapped_weights_count_neither_against_a_limit_nor_against_the_machine(exported_pair: Path) -> None:
    manifest = open_bundle(exported_pair, check="none").manifest
    plan = memory_plan(manifest, request())
    assert plan.weights > 20_000_000
    message: list[str] = []
    assert check_memory(manifest, request(), MemoryRoom(available=plan.reserved), message.append) == plan
    assert len(message) == 1
    assert "read from disk again and again" in message[0]
    assert check_memory(manifest, request(), MemoryRoom(available=plan.total), message.append) == plan
    assert len(message) == 1
    with pytest.raises(RequestError, match="are available"):
        check_memory(manifest, request(), MemoryRoom(available=plan.reserved - 1))
    assert check_memory(manifest, request(), MemoryRoom(limit=plan.reserved)) == plan
    with pytest.raises(RequestError, match="the limit is"):
        check_memory(manifest, request(), MemoryRoom(limit=plan.reserved - 1))


def test_mapped_weights_take_address_space(exported_pair: Path) -> None:
    manifest = open_bundle(exported_pair, check="none").manifest
    plan = memory_plan(manifest, request())
    left = plan.total - plan.process
    assert check_memory(manifest, request(), MemoryRoom(address_space=left)) == plan
    with pytest.raises(RequestError, match=r"of address space are left for it \(ulimit -v\)"):
        check_memory(manifest, request(), MemoryRoom(address_space=left - 1))
    # Whichever is tighter holds.
    with pytest.raises(RequestError, match="the limit is"):
        check_memory(manifest, request(), MemoryRoom(limit=plan.reserved - 1, address_space=left))


def test_pages_that_are_given_back_take_address_space_but_no_memory(exported_pair: Path) -> None:
    manifest = open_bundle(exported_pair, check="none").manifest
    kept, given = memory_plan(manifest, request()), memory_plan(manifest, request(gives_back=True))
    assert (given.mapped, given.total) == (kept.total, kept.total - min(kept.weights, kept.repacked))
    assert check_memory(manifest, request(gives_back=True), MemoryRoom(limit=given.total)) == given
    with pytest.raises(RequestError, match=r"of address space are left for it \(ulimit -v\)"):
        check_memory(manifest, request(gives_back=True), MemoryRoom(address_space=kept.total - kept.process - 1))


def test_copies_from_the_packed_cache_count_as_files_do(exported_pair: Path) -> None:
    known = open_bundle(exported_pair, check="none").manifest
    manifest = replace(known, files=tuple(replace(file, quantization="q4_0") for file in known.files))
    copied, mapped = (memory_plan(manifest, request(gives_back=True, packed_cache=packed)) for packed in (False, True))
    assert copied.repacked > 1_000_000
    assert (mapped.total + mapped.tables, mapped.mapped) == (copied.total, copied.mapped)
    assert 0 < mapped.tables < mapped.weights
    of_drafter = copied.repacked - mapped.mapped_copies
    assert 0 < of_drafter < copied.repacked
    assert mapped.reserved == copied.reserved - copied.repacked + of_drafter
    assert mapped.of_files == mapped.total - mapped.reserved > copied.of_files
    assert check_memory(manifest, request(gives_back=True, packed_cache=True), MemoryRoom(limit=mapped.reserved)) == mapped


def test_nothing_is_opened_beyond_the_limit(exported_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_probe(*_: Any, **__: Any) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr("edge_runtime.backends.llama.open.probe_load_options", no_probe)
    with pytest.raises(RequestError, match=r"but the limit is 1\.0 MB"):
        open_session(exported_pair, memory_limit="1MB")


@pytest.mark.parametrize(("kv_type", "context", "sequences"), [("f16", 1024, 1), ("q8_0", 4096, 2), ("q4_0", 8192, 1)])
def test_the_plan_is_what_llama_cpp_takes(exported_pair: Path, kv_type: str, context: int, sequences: int) -> None:
    """K/V rows to the rounding of the log, activations never above the plan and within 25% of it; the process within 35% or 40 MB,
    as libraries alone take 30 to 60 MB by the machine that they were built for."""
    bundle = open_bundle(exported_pair, check="none")
    asked = request(kv_type=kv_type, context=context, sequences=sequences, gives_back=sys.platform.startswith("linux"))
    plan: MemoryPlan = memory_plan(bundle.manifest, asked)
    paths = [str(bundle.path(role, "gguf")) for role in ("target", "drafter")]
    command = [sys.executable, "-c", MEASURE, *paths, kv_type, str(context), str(sequences)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    measured = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=300, env=environment).stdout)
    assert measured["KV"] == pytest.approx(plan.cache, abs=0.02 * 2**20)
    assert 0.75 * plan.buffers < measured["compute"] + measured["output"] < plan.buffers
    if measured["peak"] is not None:  # Linux
        assert measured["peak"] == pytest.approx(plan.total, rel=0.35, abs=40e6)


def test_copies_of_weights_are_left_out_where_only_they_do_not_fit(exported_pair: Path) -> None:
    known, message = open_bundle(exported_pair, check="none").manifest, []
    manifest = replace(known, files=tuple(replace(file, quantization="q4_0") for file in known.files))
    asked = request()
    copies, plain = memory_plan(manifest, asked), memory_plan(manifest, replace(asked, repack=False))
    assert copies.reserved > plain.reserved
    assert check_memory_without_copies(manifest, asked, MemoryRoom(available=copies.total))
    assert not check_memory_without_copies(manifest, asked, MemoryRoom(available=copies.reserved - 1), message.append)
    assert "no memory for repacked copies" in message[0]
    space = MemoryRoom(address_space=copies.total - copies.process - 1)
    assert not check_memory_without_copies(manifest, asked, space, message.append)
    with pytest.raises(RequestError, match="needs"):
        check_memory_without_copies(manifest, asked, MemoryRoom(available=plain.reserved - 1))
    with pytest.raises(RequestError, match="the limit is"):
        check_memory_without_copies(manifest, asked, MemoryRoom(limit=copies.reserved - 1))


@pytest.mark.parametrize(("quantization", "share"), [("mixed", 1), ("iq4_xs", 1), (None, 1), ("f16", 0)])
def test_a_copy_of_unknown_types_is_planned_as_large_as_the_file(quantization: str | None, share: int, exported_pair: Path) -> None:
    manifest, message = open_bundle(exported_pair, check="none").manifest, []
    manifest = replace(manifest, files=tuple(replace(file, quantization=quantization) for file in manifest.files))
    size = sum(file.bytes for file in manifest.files if file.role in ("target", "drafter"))
    assert check_memory(manifest, request(), MemoryRoom(), message.append).repacked == share * size
    assert [f"is of the unknown type {quantization!r}" in line for line in message] == [True, True] * share


TOKENS = MediaTokens(begin=1, placeholder=2, end=3)
E2B = VisionSize(hidden_size=768, layers=16, feed_forward_size=3072)


def file(role: str, size: int, quantization: str = "f16") -> BundleFile:
    return BundleFile(role=role, path=role, format="onnx", sha256="0" * 64, bytes=size, quantization=quantization)


def manifest(quantization: str = "f16", **inputs: Any) -> Manifest:
    files = [(MEDIA_ENCODER, 400_000_000), (VISION_ENCODER, 1000), (f"{VISION_ENCODER}_data", 300_000_000), (AUDIO_ENCODER, 2000)]
    media = MediaInputs(**{"image": TOKENS, "audio": TOKENS, "vision": E2B, **inputs})
    return replace(MANIFEST, files=tuple(file(role, size, quantization) for role, size in files), media=media)


def test_weights_are_those_that_are_loaded() -> None:
    assert encoder_weight_bytes(manifest()) == 400_000_000
    assert encoder_weight_bytes(manifest(), "image") == 600_002_000
    assert encoder_weight_bytes(manifest(), "sound") == 4000
    assert encoder_weight_bytes(manifest("int8"), "image") == 300_001_000
    assert encoder_weight_bytes(MANIFEST) == 0


def test_activations_are_near_those_measured() -> None:
    """E2B's tower on llama.cpp, as it was measured."""
    for rows, measured in ((64, 39e6), (256, 145e6), (529, 324e6)):
        assert 0.99 * measured < encoder_activation_bytes(manifest(), "image", rows) < 1.15 * measured
    assert encoder_activation_bytes(manifest(vision=VisionSize(hidden_size=3840)), "image", 280) == 0
    assert encoder_activation_bytes(manifest(samples_per_row=640), "sound", 750) == 0
    assert encoder_activation_bytes(manifest(), "sound", 750) > 100e6
    assert encoder_activation_bytes(MANIFEST, "image", 280) == 0


def test_only_what_is_not_yet_taken_is_needed() -> None:
    free = [500_000_000]
    room = EncoderMemory(manifest(), lambda: free[0], one_file=True)
    room.admit(picture(48, 48, 1))
    free[0] = 100_000_000
    room.admit(picture(48, 48, 2))
    with pytest.raises(RequestError, match=r"needs 155\.\d MB of memory for this image, but 100\.0 MB are available; ask for less detail"):
        room.admit(picture(768, 768, 1))
    free[0] = 160_000_000
    room.admit(picture(768, 768, 1))
    free[0] = 0
    room.admit(picture(480, 480, 1))
    with pytest.raises(RequestError, match=r"needs 400\.\d MB"):
        EncoderMemory(manifest(), lambda: 0, one_file=True).admit(picture(48, 48, 1))


def test_a_limit_is_for_all_together() -> None:
    room = EncoderMemory(manifest(), lambda: 0, one_file=True, limit=2_000_000_000, beside=1_500_000_000)
    room.admit(picture(48, 48, 1))
    with pytest.raises(RequestError, match=r"555\.\d MB .* this image, but the limit of 2\.00 GB leaves 500\.0 MB"):
        room.admit(picture(768, 768, 1))


def test_each_graph_of_onnx_is_counted_when_it_is_used() -> None:
    free = [700_000_000]
    room = EncoderMemory(manifest(), lambda: free[0], one_file=False)
    room.admit(picture(48, 48, 1))
    free[0] = 4_000_000
    with pytest.raises(RequestError, match="for this sound"):
        room.admit(noise(480_000))
    room.admit(noise(1_000))


def test_where_nothing_is_known_nothing_is_refused() -> None:
    EncoderMemory(manifest(), lambda: None, one_file=True).admit(picture(768, 768, 1))
