"""The bundle reader: what it accepts, and that it refuses everything else with one sentence, which says what to do."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from edge_devices.files.typed_json import from_json
from edge_runtime.bundle.bundle import CHECK_MODES, DEGRADED_KL, Quality, degradation, exported_quality, first_time, open_bundle
from edge_runtime.bundle.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    with_hash,
)
from edge_runtime.errors import BundleError, RequestError
from edge_runtime.session.open import open_session

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "data" / "manifest-2.json"
CONTENT = b"not really a model"


def manifest() -> Manifest:
    return from_json(Manifest, json.loads(GOLDEN.read_text()), "manifest")


def write(folder: Path, content: Manifest | str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "target.gguf").write_bytes(CONTENT)
    text = (content or manifest()).to_json() if not isinstance(content, str) else content
    (folder / "manifest.json").write_text(text)
    return folder


def test_golden_manifest_is_still_written_and_read_as_in_version_2(tmp_path):
    """Guards the format: if this fails, readers in the field break, and SCHEMA_VERSION must grow."""
    golden = manifest()
    assert golden.to_json() == GOLDEN.read_text()
    assert (golden.schema_version, golden.architecture.vocab_size, golden.cache_layout.sliding.window) == (2, 4096, 128)
    assert (golden.files[0].sha256, golden.left_out) == (hashlib.sha256(CONTENT).hexdigest(), ("vision tower",))


def test_a_manifest_written_before_the_widths_were_in_it_is_read(tmp_path):
    data = json.loads(GOLDEN.read_text())
    for file in data["files"]:
        del file["bits_per_weight"]
    for name in ("feed_forward_size", "per_layer_size", "drafter_feed_forward_size", "prompt_parameters", "experts"):
        del data["architecture"][name]
    assert from_json(Manifest, data, "manifest") == manifest()


def test_keys_a_newer_writer_adds_are_ignored(tmp_path):
    data = json.loads(manifest().to_json()) | {"novelty": [1, 2]}
    assert open_bundle(write(tmp_path / "b", with_hash(data))).manifest == manifest()


def with_changes(data: dict[str, Any], changes: dict[str, Any]) -> str:
    """A manifest with other values at these places."""
    data = copy.deepcopy(data)
    for path, value in changes.items():
        place: Any = data
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in parents:
            place = place[part]
        place[last] = value
    return with_hash(data)


def changed(path: str, value: Any) -> str:
    return with_changes(json.loads(manifest().to_json()), {path: value})


FILE = json.loads(manifest().to_json())["files"][0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "no schema_version"),
        ('{"schema_version": "1"}', "no schema_version"),
        (with_hash({"schema_version": 2}), "is missing"),
        (changed("schema_version", 3), "schema version 3, this reader supports 2; upgrade edge-mtp"),
        (changed("schema_version", 1), "schema version 1, this reader supports 2; export"),
        (changed("schema_version", -5), "schema version -5"),
        ('{"schema_version": 2}', "sha256 in its last line"),
        (manifest().to_json() + " ", "sha256 in its last line"),
        (changed("files.0.path", "../target.gguf"), "outside the bundle"),
        (changed("files.0.path", "/etc/passwd"), "outside the bundle"),
        (changed("files.0.path", "a\\b"), "outside the bundle"),
        (changed("files.0.path", ""), "outside the bundle"),
        (changed("files.0.path", "other.gguf"), "is missing"),
        (changed("files.0.bytes", 3), "the manifest says 3"),
        (changed("files.0.sha256", "0" * 64), "sha256"),
        (changed("files.0.bytes", "many"), "not int"),
        (changed("files", {}), "not a list"),
        (changed("cache_layout.layer_owners", [0, 1, 2, 1]), "own no rows"),
        (changed("cache_layout.layer_owners", [0]), "own no rows"),
        (changed("cache_layout.drafter_sources", [0, 5]), "own no rows"),
        (changed("cache_layout.rewind_slack", 3), "rewind slack 3"),
        (changed("architecture.layers", True), "not int"),
        (changed("architecture.vocab_size", 0), r"vocab_size is 0, not 1 to 2\^53"),
        (changed("architecture.hidden_size", -1), "hidden_size is -1"),
        (changed("architecture.parameters", (1 << 53) + 1), r"not 1 to 2\^53"),
        (changed("architecture.context_length", 10**400), "an integer of 1329 bits"),
        (changed("architecture.per_layer_size", -1), "not 0 to"),
        (changed("cache_layout.full.kv_heads", 0), r"full\.kv_heads is 0"),
        (changed("cache_layout.sliding.window", -1), r"sliding\.window is -1"),
        (changed("cache_layout.full.owner_layers", [-1]), r"owner_layers\[0\] is -1"),
        (changed("files.0.bytes", -1), r"files\[0\]\.bytes is -1"),
        (changed("sources.target.files.0.bytes", -1), r"sources\.target\.files\[0\]\.bytes is -1"),
        (changed("parity", {"a": [{"b": float("inf")}]}), "not a finite number"),
        (changed("parity", {"a": [10**400]}), "an integer of 1329 bits"),
        (changed("files", [FILE, FILE | {"role": "drafter"}]), "twice"),
        (changed("files", [FILE, FILE | {"path": "./target.gguf", "role": "drafter"}]), "twice"),
        (changed("files", [FILE, FILE | {"path": "other"}]), "twice"),
        (changed("files", [FILE] * 65), "lists 65 files, more than 64"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_refuses_with_a_sentence(tmp_path, content, words):
    with pytest.raises(BundleError, match=words) as caught:
        open_bundle(write(tmp_path / "b", content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("architecture.parameters", 1 << 53), ("architecture.per_layer_size", 0)])
def test_numbers_at_their_limits_are_read(tmp_path, key, value):
    assert open_bundle(write(tmp_path / "b", changed(key, value)))


def test_missing_folder_and_missing_role(tmp_path):
    with pytest.raises(BundleError, match="not a bundle"):
        open_bundle(tmp_path / "none")
    bundle = open_bundle(write(tmp_path / "b"))
    with pytest.raises(BundleError, match="no gguf drafter"):
        bundle.file("drafter", "gguf")
    assert [bundle.has("target"), bundle.has("target", "gguf"), bundle.has("target", "onnx"), bundle.has("drafter")] == [1, 1, 0, 0]


def many(folder: Path, paths: list[str]) -> Path:
    """A bundle of equal files, each with a role of its own."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(CONTENT)
    return write(folder, changed("files", [FILE | {"path": path, "role": f"part {number}"} for number, path in enumerate(paths)]))


def test_as_many_files_and_as_long_paths_as_are_allowed(tmp_path):
    bundle = open_bundle(many(tmp_path / "files", [f"file-{number}" for number in range(64)]))
    assert (bundle.has("part 0"), bundle.has("part 63"), bundle.has("part 64")) == (True, True, False)
    longest = f"{'a' * 99}/{'b' * 100}"
    assert open_bundle(many(tmp_path / "long", [longest])).path("part 0").read_bytes() == CONTENT
    with pytest.raises(BundleError, match="outside the bundle"):
        open_bundle(many(tmp_path / "longer", [f"{longest}b"]))


def test_a_manifest_that_is_too_large_is_refused(tmp_path):
    with pytest.raises(BundleError, match=f"more than {MAX_MANIFEST_BYTES} bytes"):
        open_bundle(write(tmp_path / "b", " " * (MAX_MANIFEST_BYTES + 1)))


@pytest.mark.parametrize(("name", "other"), [("end_tokens", "suppress_tokens"), ("suppress_tokens", "end_tokens")])
def test_generation_defaults_name_tokens_of_the_vocabulary_only(tmp_path, name, other):
    assert open_bundle(write(tmp_path / "b", changed("generation", {name: [1, 4095], other: [2]})))
    with pytest.raises(BundleError, match="beyond the vocabulary of 4096"):
        open_bundle(write(tmp_path / "b", changed("generation", {name: [1, 4096], other: [2]})))


@pytest.mark.parametrize("name", ["target.gguf", "manifest.json"])
@pytest.mark.parametrize("place", ["b/inside", "outside"])
@pytest.mark.parametrize("mode", CHECK_MODES)
def test_links_are_refused(tmp_path, name, place, mode):
    folder = write(tmp_path / "b")
    (folder / name).rename(tmp_path / place)
    (folder / name).symlink_to(tmp_path / place)
    with pytest.raises(BundleError, match=rf"{name}.* is a symbolic link"):
        open_bundle(folder, check=mode)


def test_a_bundle_may_be_reached_through_a_link(tmp_path):
    write(tmp_path / "b")
    (tmp_path / "link").symlink_to("b")
    assert open_bundle(tmp_path / "link").manifest == manifest()


def test_a_manifest_that_is_a_pipe_is_refused_without_waiting(tmp_path):
    folder = write(tmp_path / "b")
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(BundleError, match="not a regular file"):
        open_bundle(folder)


def test_every_byte_of_a_manifest_counts(tmp_path):
    """One bit of each byte is flipped: each of the eight at an eighth of the places."""
    folder = write(tmp_path / "b")
    raw = (folder / "manifest.json").read_bytes()
    # In its place: a file that is written anew waits for the disk each time.
    with (folder / "manifest.json").open("r+b", buffering=0) as file:
        for place, byte in enumerate(raw):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << place % 8]), place)
            with pytest.raises(BundleError):
                open_bundle(folder, check="none")
            os.pwrite(file.fileno(), bytes([byte]), place)
    open_bundle(folder, check="none")


def test_no_check_beside_a_key_is_refused(tmp_path):
    with pytest.raises(RequestError, match="cannot vouch for files that are not checked"):
        open_bundle(write(tmp_path / "b"), check="none", public_key=tmp_path / "key.pub")


# As it was exported, with the golden bundle's file in the place of its own.
ONNX = json.loads((ROOT / "fuzz" / "corpus" / "manifest" / "onnx.json").read_text()) | {"files": [FILE]}
ONNX["media"] = {"image": {"begin": 5, "placeholder": 6, "end": 7}}


def test_a_manifest_of_graphs_is_read_as_it_was_exported(tmp_path: Path) -> None:
    half = {"onnx.rotations.0.rotated_pairs": ONNX["onnx"]["rotations"][0]["head_dim"] // 2, "onnx.bos_token": 4095}
    for changes in ({}, half):
        open_bundle(write(tmp_path / "b", with_changes(ONNX, changes)))


HEADS = {f"cache_layout.buffers.{number}.head_dim": 65536 for number in range(4)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"onnx.rotations.0.rotated_pairs": 1 << 28}, "turns 268435456 pairs of heads of"),
        ({"onnx.rotations.1.rotated_pairs": 33}, "turns 33 pairs of heads of 64"),
        ({"onnx.rotations.0.head_dim": 65536}, "heads of 65536 are wider than any, 8192 at most"),
        ({"cache_layout.full.head_dim": 8194}, "heads of 8194 are wider"),
        (HEADS, "heads of 65536 are wider"),
        ({"onnx.rotations.0.head_dim": 64}, "the rotations are for heads of"),
        ({"cache_layout.buffers.0.head_dim": 32}, "the rotations are for heads of"),
        ({"onnx.rotations.1.kind": "full"}, "the rotations are for heads of"),
        ({"onnx.rotations": []}, "the rotations are for heads of"),
        ({"onnx.bos_token": 1 << 40}, r"the facts of the graphs name a token beyond the vocabulary of 4096 \(1099511627776\)"),
        ({"onnx.eos_token": 4096}, "beyond the vocabulary of 4096"),
        ({"onnx.eog_tokens": [1, 4096]}, "beyond the vocabulary of 4096"),
        ({"onnx.control_tokens": [0, 1 << 33]}, "beyond the vocabulary of 4096"),
        ({"media.image.placeholder": 4096}, "the media inputs name a token beyond the vocabulary"),
        ({"generation": {"end_tokens": [4096]}}, "the generation defaults name a token beyond the vocabulary"),
        ({"cache_layout.buffers.0.key": "key\ud800"}, "has the name 'key.*', which none is"),
        ({"cache_layout.buffers.0.value": "\x1b[2J"}, "has the name"),
        ({"cache_layout.buffers.0.kind": ""}, "has the name ''"),
        ({"onnx.rotations.0.kind": "full\n"}, "has the name"),
        ({"onnx.contrib_ops": ["x" * 201]}, "has the name"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_memory_is_taken_for_it(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BundleError, match=words) as caught:
            open_bundle(write(tmp_path / "b", with_changes(ONNX, changes)))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("files", "value", "answer"),
    [
        (["a.gguf"], "a.gguf", r"it is a GGUF file; make a bundle of it and its drafter with: edge-export .*a\.gguf DRAFTER --output my-b"),
        (["a.txt"], "a.txt", "it is a file; give a bundle's folder"),
        (["x/mtp-drafter.gguf", "x/target.gguf"], "x", r"edge-export pair \S*x/target.gguf \S*x/mtp-drafter.gguf --output my-bundle"),
        (["x/config.json", "x/model.safetensors"], "x", "it holds a checkpoint; make a bundle of it and its drafter with: edge-export"),
        (["my-bundle/manifest.json"], "my-bunlde", "there is no such folder; did you mean .*my-bundle"),
        (["out/my-bundle/manifest.json"], "out", "it has no manifest.json, but .*out/my-bundle is one"),
        (["x/notes.txt"], "x", "it has no manifest.json; make one with edge-export"),
        ([], "nowhere", "there is no such folder; make a bundle with edge-export"),
    ],
)
def test_what_is_no_bundle_is_recognised(tmp_path: Path, files: list[str], value: str, answer: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(BundleError, match=f"is not a bundle: .*{answer}"):
        open_bundle(tmp_path / value)


@pytest.mark.parametrize(
    ("name", "drafter", "output"),
    [
        ("google/gemma-4-E2B-it", "", "gemma-4-E2B-it"),
        ("google/gemma-4-E2B-it@main", "", "gemma-4-E2B-it"),
        ("someone/gemma-4-E2B-it", " someone/gemma-4-E2B-it-assistant", "gemma-4-E2B-it"),
        ("unsloth/x-GGUF", "", "x-GGUF"),
        ("ggml-org/x:x-Q4_0.gguf", "", "x"),
        ("ggml-org/x:Q4_0", "", "x"),
    ],
)
def test_a_hub_name_is_answered_with_its_export(
    name: str, drafter: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BundleError, match=f"edge-export pair {name}{drafter} --output {output}$"):
        open_bundle(name)


FIGURES: dict[str, Any] = {"rows": 528, "mean_kl": 1.04, "perplexity": 268.4, "reference_perplexity": 87.0, "greedy_agreement": 0.43}


def test_figures_are_put_in_words() -> None:
    quality = exported_quality({"quality": FIGURES | {"texts": {}}})
    assert quality == Quality(**FIGURES)
    assert quality.words == "keeps 43% of the model's first choices, perplexity 268 instead of 87 (mean KL 1.04)"


def test_only_what_has_lost_much_is_mentioned() -> None:
    assert degradation({"quality": FIGURES}, "my-bundle") == (
        "my-bundle answers worse than its model: it keeps 43% of the model's first choices, perplexity 268 instead of 87 (mean KL 1.04);"
        " export it in a type of more bits, or calibrated."
    )
    assert degradation({"quality": FIGURES | {"mean_kl": DEGRADED_KL}}, "my-bundle") is None


@pytest.mark.parametrize("value", [None, "1", True, -1, float("nan"), float("inf"), 10**400, [1.0]])
@pytest.mark.parametrize("name", FIGURES)
def test_figures_that_are_none_are_not_read(name: str, value: object) -> None:
    assert exported_quality({"quality": FIGURES | {name: value}}) is None


@pytest.mark.parametrize("parity", [None, 5, "x", [], {}, {"quality": None}, {"quality": []}, {"skipped": "no"}])
def test_parity_without_quality(parity: object) -> None:
    assert exported_quality(parity) is None
    assert degradation(parity, "bundle") is None


def test_a_bundle_is_mentioned_once_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path / "cache"))
    assert [first_time(["llama", "a"]), first_time(["llama", "a"]), first_time(["onnx", "a"])] == [True, False, True]
    monkeypatch.setenv("EDGE_MTP_CACHE", "/dev/null")
    assert [first_time(["llama", "a"]), first_time(["llama", "a"])] == [True, True], "a cache that cannot be written"


def test_opening_mentions_it_the_first_time(exported_pair: Path, probe_memory: None, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(exported_pair, tmp_path / "bundle", copy_function=shutil.copy))
    manifest = copy / "manifest.json"
    manifest.write_text(with_hash(json.loads(manifest.read_text()) | {"parity": {"quality": FIGURES}}))
    for times in (1, 0):
        notes: list[str] = []
        with open_session(copy, threads=1, notify=notes.append):
            assert sum("bundle answers worse than its model: it keeps 43%" in note for note in notes) == times
