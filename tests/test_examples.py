"""Every script of examples/ runs on the reference pair, as its own first lines say, and prints what it is there to show."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
# What the output must contain, by script; other libraries it needs.
SHOWN = {
    "chat": "tokens of the prompt were in the cache already]",
    "constrained_json": " sides\n",
    "energy_of_a_run": "200 tokens: ",
    "explain_profit": "\n64 tokens in ",
    "generate": "of the drafts accepted",
    "onnx_backend": " tok/s on split drafts",
    "openai_client": " drafts accepted",
    "stream": " rounds, ",
}
NEEDS = {"constrained_json": ("llguidance", "grammar"), "openai_client": ("openai", "dev"), "onnx_backend": ("onnxruntime", "onnx")}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who installed the package: its commands are on the path, and costs measured once are remembered."""
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cache = str(tmp_path_factory.mktemp("cache"))
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": binaries, "EDGE_MTP_CACHE": cache}


def run(name: str, bundle: Path, machine: dict[str, str]) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=machine, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_without_a_bundle_says_how_it_is_used(name: str, machine: dict[str, str]) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name][0], reason=f"needs edge-mtp[{NEEDS[name][1]}]")
    if name == "export_pair":
        pytest.importorskip("onnx", reason="needs edge-mtp[export-onnx]")
    done = subprocess.run([sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, env=machine, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"usage: python examples/{name}.py ")


# Each on one engine: what a script shows does not depend on it.
@pytest.mark.parametrize(("name", "engine"), list(zip(sorted(SHOWN), itertools.cycle(["gguf", "onnx"]), strict=False)))
def test_an_example_shows_what_it_says(
    name: str, engine: str, request: pytest.FixtureRequest, onnx_pair: Callable[[str], Path], machine: dict[str, str]
) -> None:
    assert (name, engine) != ("onnx_backend", "gguf")
    if name in NEEDS:
        library, extra = NEEDS[name]
        pytest.importorskip(library, reason=f"needs edge-mtp[{extra}]")
    if name == "openai_client":
        pytest.importorskip("uvicorn", reason="needs edge-mtp[serve]")
    bundle = onnx_pair("int8") if engine == "onnx" else request.getfixturevalue("exported_pair")
    assert SHOWN[name] in "\n " + run(name, bundle, machine)


def test_the_export_example_makes_a_bundle(tmp_path: Path, machine: dict[str, str]) -> None:
    pytest.importorskip("onnx", reason="needs edge-mtp[export-onnx]")
    from edge_runtime.bundle.bundle import open_bundle

    text = run("export_pair", tmp_path / "bundle", machine)
    files = open_bundle(tmp_path / "bundle").manifest.files
    assert [line.split()[0] for line in text.splitlines()][-len(files) :] == [file.role for file in files]


def test_every_example_is_run_and_listed() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == {*SHOWN, "export_pair"}
    readme = (EXAMPLES / "README.md").read_text()
    assert [name for name in sorted(scripts) if f"[{name}.py]({name}.py)" not in readme] == []
