"""What the documents show runs on the reference pair: every script of examples/, the Python of docs/python.md and of README, and
docs/get-started.md, command by command, as each is written there.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
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


PYTHON = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
ON_PAGES = [code for page in ("docs/python.md", "README.md") for code in PYTHON.findall((ROOT / page).read_text(encoding="utf-8"))]
BUNDLES = ("my-bundle", "demo-bundle-onnx")  # as the pages call it


@pytest.mark.parametrize("number", range(len(ON_PAGES)))
def test_the_python_of_a_page_runs(
    number: int,
    exported_pair: Path,
    probe_memory: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = ON_PAGES[number]
    if "split" in code and not list(exported_pair.glob("*head*")):
        pytest.skip("the pair has no split drafter")
    monkeypatch.chdir(tmp_path)
    for name in BUNDLES:
        if name in code:
            shutil.copytree(exported_pair, tmp_path / name)
    exec(compile("import edge_runtime\n" + code, f"example {number + 1}", "exec"), {})
    if "print" in code:
        assert capsys.readouterr().out


# What installs, downloads a published model, compiles llama.cpp or builds a container.
LEFT_OUT = re.compile(r"python3 -m venv|pip install|google/|gemma-e2b|gguf-bundle|docker|plan E2B")
# Fewer runs than the page asks for, and of the pair itself, not widened to the cost of a phone's: nobody reads these figures.
SHORT = {"edge-bench run": "--repeats 1 --max-tokens 8 --domains code --warm-up 0 --check none"}
ANSWERS = {"edge-run chat": "What is a stack?\n"}


def steps() -> list[str]:
    """The indented commands of the page, in its order."""
    return [
        line
        for line in re.findall(r"^ {4}(\S.*)$", (ROOT / "docs/get-started.md").read_text(encoding="utf-8"), re.MULTILINE)
        if not LEFT_OUT.search(line)
    ]


@pytest.mark.slow(60)
def test_the_steps_to_get_started_run(tmp_path: Path, machine: dict[str, str]) -> None:
    for library, extra in (("onnx", "export-onnx"), ("onnxruntime", "onnx"), ("uvicorn", "serve"), ("matplotlib", "report")):
        pytest.importorskip(library, reason=f"needs edge-mtp[{extra}]")
    lines, server, environment = steps(), None, machine | {"EDGE_MTP_CACHE": str(tmp_path / "cache")}
    assert {line.split()[0] for line in lines} == {"edge-run", "edge-export", "edge-bench", "curl"}
    try:
        for line in lines:
            name = " ".join(line.split()[:2])
            command = f"{line} {SHORT.get(name, '')}".replace(" --widened", "").replace("8080", "18573")
            command = command.replace("curl -s", "curl -s --retry 9 --retry-connrefused")
            if name == "edge-run serve":
                server = subprocess.Popen(f"exec {command}", shell=True, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
                continue
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=environment, input=ANSWERS.get(name, ""), capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            if name.startswith("curl"):
                assert "last item in is the first one out" in done.stdout
    finally:
        if server is not None:
            server.terminate()
            server.wait(30)
    assert "speed" in (tmp_path / "report.html").read_text(encoding="utf-8")
