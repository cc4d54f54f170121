"""What other programs read in a bundle's folder: names by which they pair the files, presets, the model card."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_export.pipeline.gguf_step import model_name
from edge_export.pipeline.publish import card, modelfile, preset
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import BundleFile, GenerationDefaults, Manifest, ModelSource
from kept import shipped_bundle
from phones import free_port
from polling import wait


@pytest.mark.parametrize(
    ("origin", "name"),
    [
        ("google/gemma-4-E2B-it", "gemma-4-E2B-it"),
        ("google/gemma-4-E2B-it@refs/pr/1", "gemma-4-E2B-it"),
        ("unsloth/gemma-4-E2B-it-GGUF:gemma-4-E2B-it-Q4_K_M.gguf", "gemma-4-E2B-it"),
        ("owner/name@main:sub/gemma-4-12B-it-qat-q4_0.gguf", "gemma-4-12B-it-qat"),
        ("somebody/gemma-4-E4B-MTP-GGUF", "gemma-4-E4B-GGUF"),
        ("my model (2)", "my-model--2"),
        ("mmproj", "target"),
        ("x-00001-of-00004", "x"),
        ("Q4_0", "Q4_0"),
        ("ü" * 300, "target"),
    ],
)
def test_a_target_is_named_so_that_llama_cpp_takes_it_for_one(origin: str, name: str) -> None:
    assert model_name(SimpleNamespace(public_name=origin)) == name  # type: ignore[arg-type]


def manifest_of(bundle: Path, **changes: Any) -> Manifest:
    return replace(open_bundle(bundle).manifest, **changes)


@pytest.fixture(scope="module")
def bundle() -> Path:
    return shipped_bundle(target_quantization="f16", drafter_quantization="f16", context=4096)


def test_the_presets_name_the_files_and_what_the_checkpoint_samples_with(bundle: Path) -> None:
    generation = GenerationDefaults(temperature=1.0, top_k=64, top_p=0.95)
    encoder = BundleFile(path="mmproj-x-F16.gguf", role="media_encoder", format="gguf", bytes=1, sha256="0" * 64, quantization="f16")
    manifest = manifest_of(bundle, generation=generation)
    manifest = replace(manifest, files=(*manifest.files, encoder))
    settings = configparser.ConfigParser()
    settings.read_string("[top]\n" + preset(manifest))
    assert dict(settings["target"]) == {
        "model": "target-F16.gguf",
        "spec-draft-model": "mtp-target-F16.gguf",
        "spec-type": "draft-mtp",
        "spec-draft-n-max": "3",
        "ctx-size": "4096",
        "mmproj": "mmproj-x-F16.gguf",
        "temp": "1",
        "top-k": "64",
        "top-p": "0.95",
    }
    lines = modelfile(manifest).splitlines()
    assert lines[1:4] == ["FROM ./target-F16.gguf", "FROM ./mmproj-x-F16.gguf", "DRAFT ./mtp-target-F16.gguf"]
    assert "PARAMETER top_k 64" in lines


def test_the_card_has_the_hubs_metadata_and_the_exports_figures(bundle: Path) -> None:
    names = {"target": "google/gemma-4-E2B-it", "drafter": "google/gemma-4-E2B-it-assistant"}
    quality = {"rows": 501, "mean_kl": 0.0123, "perplexity": 9.5, "reference_perplexity": 9.25, "greedy_agreement": 0.956}
    manifest = manifest_of(
        bundle,
        sources={role: ModelSource(origin=name, model_type="gemma4", files=()) for role, name in names.items()},
        parity={"quality": quality, "drafts": {"quantized_agreement": 0.99}},
    )
    _, metadata, text = card(manifest).split("---\n", 2)
    import yaml

    facts = yaml.safe_load(metadata)
    assert facts["base_model"] == list(names.values())
    assert (facts["base_model_relation"], facts["license"], facts["library_name"]) == ("quantized", "apache-2.0", "edge-mtp")
    assert {"gguf", "speculative-decoding"} <= {*facts["tags"]}
    assert "| GGUF | 0.0123 | 9.5 | 9.25 | 95.6% | 99.0% |" in text
    ours = yaml.safe_load((bundle / "README.md").read_text().split("---\n", 2)[1])
    assert "base_model" not in ours, "a folder's name is no name on the hub"
    assert "license" not in ours


def test_a_card_says_why_nothing_was_compared(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    for skipped in ({"skipped": "for a reason"}, {"onnx": {"skipped": "for a reason"}}):
        text = card(replace(manifest, parity=skipped, description="an example"))
        assert "were not measured (for a reason)" in text
        assert "It is an example." in text


def llama_cpp(name: str) -> str:
    """The path of one of llama.cpp's own programs."""
    program = shutil.which(name, path=os.environ.get("EDGE_MTP_LLAMA_CPP_BIN", ""))
    if program is None:
        pytest.skip(f"EDGE_MTP_LLAMA_CPP_BIN has no {name}; scripts/setup/build_llama_cpp.sh VENV server builds it")
    return program


@contextmanager
def llama_server(*arguments: str, folder: Path) -> Iterator[str]:
    """llama.cpp's own server; yields its address once it is up."""
    program, port = llama_cpp("llama-server"), free_port()
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen([program, *arguments, "--port", str(port), "--no-warmup"], cwd=folder, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        assert wait(lambda: process.poll() is not None or is_up(address), 60)
        assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def is_up(address: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{address}/health", timeout=5).read())
    except OSError:
        return False


def completed(address: str, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": "class Stack:", "max_tokens": 24, "temperature": 0, "cache_prompt": False}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer: dict[str, Any] = json.loads(urllib.request.urlopen(request, timeout=120).read())
    return answer


@pytest.mark.peer
@pytest.mark.parametrize("how", ["folder", "preset", "files"])
def test_llama_cpps_server_pairs_the_files_and_writes_the_same_text(bundle: Path, tmp_path: Path, how: str) -> None:
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    import edge_runtime

    with edge_runtime.open_session(bundle, backend="llama") as session:
        expected = session.generate("class Stack:", max_tokens=24).text()
    copied = shutil.copytree(bundle, tmp_path / "models" / "pair")
    arguments, folder, model = {
        "folder": (("--models-dir", str(tmp_path / "models"), "--spec-type", "draft-mtp"), tmp_path, "pair"),
        "preset": (("--models-preset", "models.ini"), copied, "target"),
        "files": (("-m", "target-F16.gguf", "-md", "mtp-target-F16.gguf", "--spec-type", "draft-mtp"), copied, "target"),
    }[how]
    with llama_server(*arguments, "-ngl", "0", folder=folder) as address:
        answer = completed(address, model)
    assert answer["choices"][0]["text"] == expected
    assert answer["timings"]["draft_n"] > 0, "the drafter was paired"


@pytest.mark.peer
@pytest.mark.parametrize("drafts", [(), ("-md", "mtp-target-F16.gguf", "--spec-type", "draft-mtp")], ids=["plain", "drafts"])
def test_llama_cpps_chat_writes_the_text_of_ours(bundle: Path, drafts: tuple[str, ...]) -> None:
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    from edge_runtime.cli.run import main

    ours = CliRunner().invoke(main, ["chat", str(bundle), "--backend", "llama", "--lines", "-n", "24", "-T", "0"], input="class Stack:\n")
    options = ("--temp", "0", "-n", "24", "--single-turn", "--simple-io", "--no-repack", "--log-verbosity", "0")
    theirs = subprocess.run(
        [llama_cpp("llama-cli"), "-m", "target-F16.gguf", *drafts, "-p", "class Stack:", *options],
        cwd=bundle, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    text = theirs.partition("> class Stack:\n")[2].partition("\n[ Prompt:")[0]
    assert text.strip()
    assert ours.stdout.startswith(text.rstrip())
