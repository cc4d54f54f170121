"""A short campaign of scripts/checks/fuzz.py over every reader, and regression inputs. Long campaigns: docs/security.md."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

if not hasattr(os, "fork") or not Path("/proc/self/statm").exists():
    pytest.skip("the campaign watches forked children through /proc, which only Linux has", allow_module_level=True)
pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_devices.meters.android import parse_channels, parse_rails
from edge_devices.meters.apple import parse_powermetrics
from edge_runtime.backends.kernels.loader import variant
from fuzz import READERS
from fuzzing.campaign import HANG_SECONDS, run_campaign
from fuzzing.mutation import input_of
from fuzzing.readers import Reader, corpus
from pictures import picture_bundle

NEEDS = {
    **dict.fromkeys(("head-file", "gguf-model", "gguf-drafter", "gguf-weights", "gguf-encoder", "kv-state", "prompt"), "llama_cpp"),
    **dict.fromkeys(("onnx-model", "onnx-drafter", "bundle-facts"), "onnxruntime"),
    "tokenizer-library": "tokenizers",
}
FEW = {
    **dict.fromkeys(("gguf-model", "gguf-drafter", "onnx-drafter"), 60),
    **dict.fromkeys(("gguf-encoder", "onnx-model", "config"), 150),
    **{"gguf-weights": 10, "bundle-facts": 40},
}


# The fixtures that make the bundles which readers need.
BUNDLES = {"gguf": "exported_pair", "encoder": "pictures", "graphs": "graphs"}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    pytest.importorskip("onnx")
    return picture_bundle()


@pytest.fixture
def graphs(onnx_pair: Callable[..., Path]) -> Path:
    if variant() is None:
        pytest.skip("the row kernels were not built: pip install -e . builds them")
    return onnx_pair("int8", kv="int8")


@pytest.mark.parametrize("name", sorted(READERS))
def test_hostile_inputs_are_read_or_refused(name: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip(NEEDS.get(name, "json"))
    reader = READERS[name]
    bundle = request.getfixturevalue(BUNDLES[reader.needs]) if reader.needs else None
    if name == "prompt":
        pytest.importorskip("tokenizers")
    report = run_campaign(reader, FEW.get(name, 400), 2, bundle)
    assert report.failures == ()
    assert report.inputs == report.read + report.refused == FEW.get(name, 400)


def opened(name: str, folder: Path) -> Callable[[bytes], None]:
    return READERS[name].open(folder / "work", None).read


def gguf(name: bytes) -> bytes:
    """A GGUF with one tensor, of five dimensions."""
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", len(name)) + name + struct.pack("<I", 5) + bytes(80)


def changed(reader: str, change: Callable[[dict], object]) -> bytes:
    data = json.loads(corpus(reader)[0])
    change(data)
    return json.dumps(data).encode()


def npy(header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(1024)


def onnx(name: bytes) -> bytes:
    """An identity graph whose input has this name."""
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info("x" * len(name), TensorProto.FLOAT, [1])
    end = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    node = helper.make_node("Identity", ["x" * len(name)], ["y"])
    model = helper.make_model(helper.make_graph([node], "g", [value], [end]), opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model.SerializeToString().replace(b"x" * len(name), name)


# What the campaigns found: reader, input, and what it did before.
RESULT = [
    ("config", b"{}", "KeyError"),
    ("manifest", changed("manifest", lambda m: m["files"][0].update(path="\ud800")), "UnicodeEncodeError"),
    ("manifest", changed("manifest", lambda m: m["files"][0].update(path="\u00e9" * 300)), "OSError: file name too long"),
    ("manifest", changed("manifest", lambda m: m["files"][0].update(path="a\x1b[2J")), "a terminal's screen cleared by the message"),
    ("gguf-header", gguf(b"\n\x1b[31m"), "control characters in the message"),
    ("gguf-header", gguf(b"x" * 100_000), "a message of 100,000 characters"),
    ("safetensors-index", b'{"weight_map": {"a": "' + b"9" * 5000 + b'.safetensors"}}', "OSError: file name too long"),
    ("npy-table", npy(b"{'descr': '<f4', 'shape': (8, 16), \n"), "tokenize.TokenError"),
    ("chat-template", b"{{ 1e999.x.y }}", "NameError"),
    ("run-log", b"[" * 100_000, "RecursionError"),
    ("meters", b"[" * 100_000, "RecursionError"),
    ("meters", changed("meters", lambda m: m["commands"][0].update(output="\ud800")), "UnicodeEncodeError: an answer"),
    ("meter-table", b"time_s,\x1b[2J\n0,1\n", "control characters in the message"),
    ("adb-answer", b"0\nexit=" + b"9" * 5000, "ValueError: Exceeds the limit (4300 digits)"),
    ("adb-answer", b"9" * 5000 + b"\n", "ValueError: an exit code of 5,000 digits"),
    ("chat-file", changed("chat-file", lambda c: c.update(version="x" * 5000)), "a message of 5,000 characters"),
    ("hf-config", changed("hf-config", lambda c: c.update(model_type="\x07" * 5000)), "a message of 5,000 characters"),
]


# An empty mapping is a configuration that says nothing; a device's number that is none counts as not said.
HARMLESS = ("KeyError", "UnicodeEncodeError: an answer", "ValueError: Exceeds the limit (4300 digits)")


@pytest.mark.parametrize(("name", "data", "before"), RESULT, ids=[f"{name}-{before[:20]}" for name, _, before in RESULT])
def test_what_once_did_harm_is_refused_in_a_sentence(name: str, data: bytes, before: str, tmp_path: Path) -> None:
    read = opened(name, tmp_path)
    if before in HARMLESS:
        read(data)
        return
    with pytest.raises(READERS[name].errors) as caught:
        read(data)
    assert 0 < len(str(caught.value)) < 2000
    assert str(caught.value).isprintable()


def test_a_table_whose_header_says_it_has_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(READERS["npy-table"].errors, match=r"of version \(3, 0\)"):  # NumPy would take the memory before it looks
        opened("npy-table", tmp_path)(b"\x93NUMPY\x03\x00" + struct.pack("<I", 1 << 30) + b"{'descr': '<f4'")


NINES = "9" * 5000


def test_numbers_of_thousands_of_digits_are_no_readings() -> None:
    assert parse_rails(f"CH0(T=1)[A], {NINES}\nCH1[B], 12") == {"B": 12}
    assert parse_channels(f"ChannelId: {NINES}, ChannelName: A\nChannelId: 3, ChannelName: B") == {3: "B"}
    assert parse_powermetrics(f"CPU Power: {NINES} mW\nGPU Power: 5 mW") == {"GPU": 0.005}


def test_names_of_an_onnx_graph_that_are_not_utf_8(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    with pytest.raises(READERS["onnx-model"].errors, match="not UTF-8"):
        opened("onnx-model", tmp_path)(onnx(b"\x8c\xff"))


def test_a_panic_of_the_tokenizer_library_is_an_error_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    reader = READERS["tokenizer-library"]
    ready = reader.open(tmp_path / "work", None)
    panics = input_of(ready.seeds, 7, 130, structured=True)
    with pytest.raises(reader.errors):
        ready.read(panics)


def misbehaving(read: Callable[[bytes], None]) -> Reader:
    seeds = corpus("manifest")
    return Reader(name="manifest", make=lambda _folder, _bundle: lambda data: None if data in seeds else read(data))


@pytest.mark.parametrize(
    ("read", "kind", "says"),
    [
        (lambda _: {}["x"], "error", "KeyError"),
        (lambda _: os.kill(os.getpid(), 9), "crash", "SIGKILL"),
        (lambda _: Path("/etc/hostname").read_text(), "error", "ForbiddenError: open"),
        (lambda _: eval("1"), "error", "ForbiddenError: exec"),
        (lambda _: os.system("true"), "error", "ForbiddenError: os.system"),
        (lambda _: bytearray(64 << 20), "memory", "bytes for an input"),
    ],
)
def test_the_campaign_sees_what_it_looks_for(read: Callable[[bytes], None], kind: str, says: str) -> None:
    report = run_campaign(misbehaving(read), 3, 1)
    assert (report.failures[0].kind, says in report.failures[0].what) == (kind, True)


def test_the_campaign_sees_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    assert HANG_SECONDS == 10
    monkeypatch.setattr("fuzzing.campaign.HANG_SECONDS", 0.3)
    report = run_campaign(misbehaving(lambda _: time.sleep(30)), 1, 1)
    assert report.failures[0].kind == "hang"
