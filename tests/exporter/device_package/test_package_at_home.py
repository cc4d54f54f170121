"""A package for this machine does what its README says, and what it lacks it says without advising pip, which it does not have."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator

import pytest

from edge_export.device_package.inventory import SITE
from edge_runtime.backends.kernels.loader import NAME, VARIABLE, variant
from package_home import Home, chat_bundle
from stub_package import made_package

if (platform.system(), platform.machine()) not in (("Linux", "x86_64"), ("Linux", "aarch64")):
    pytest.skip("packages are for Linux and Android", allow_module_level=True)

pytestmark = pytest.mark.slow(30)
PLATFORM = "linux-x64" if platform.machine() == "x86_64" else "linux-arm64"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
    folder = tmp_path_factory.mktemp("home")
    package = made_package(PLATFORM, folder / PLATFORM)
    shutil.copytree(chat_bundle(), folder / "my-bundle")
    environment = {"HOME": str(folder), "PATH": os.environ["PATH"]}
    return Home(folder=folder, readme=(package / "README.md").read_text(), command=lambda line: ["sh", "-c", line], environment=environment)


def test_the_readme_of_a_package_is_true(home: Home) -> None:
    copy, chat, serve, bench = home.lines()
    assert copy == f"scp -r {PLATFORM} my-bundle " + ("USER@HOST:" if PLATFORM == "linux-x64" else "pi@raspberrypi:")
    home.chat(chat)
    home.serve(serve)
    assert home.bench(bench).header.row_kernels == variant()


def test_a_record_says_that_standard_operators_ran(home: Home) -> None:
    assert home.bench(f"{VARIABLE}=none {home.lines()[-1]}").header.row_kernels == "none"


def test_doctor_judges_what_is_there(home: Home) -> None:
    found = json.loads(home.run(f"{PLATFORM}/bin/edge-run doctor --json").stdout)
    assert found["ready"]
    assert {extra["name"]: bool(extra["missing"]) for extra in found["extras"]} == {"onnx": False, "grammar": False, "serve": False}
    assert (found["package"]["faults"], found["install"]) == ([], None)
    text = home.run(f"COLUMNS=300 {PLATFORM}/bin/edge-run doctor").stdout
    assert f"{PLATFORM}: all " in text
    assert f"ok  {variant()}: all drafts of a step are checked" in text
    assert "images and sound (--with-media)" in text
    assert not [word for word in ("pip ", "none of its packages", "webgpu", "export-onnx") if word in text]
    library = home.folder / PLATFORM / SITE / "edge_runtime/backends/kernels/lib" / NAME
    kept = library.rename(home.folder / NAME)
    text = home.run(f"COLUMNS=300 {PLATFORM}/bin/edge-run doctor").stdout
    kept.rename(library)
    assert "no row kernels: standard operators; there are no row kernels in this installation" in text
    assert f"missing or changed files: 1 ({library.relative_to(home.folder / PLATFORM)}); copy the package again" in text


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("llguidance", "generate my-bundle x --json-schema {}"),
        ("starlette", "serve my-bundle"),
        ("onnxruntime", "generate my-bundle x"),
        (None, "generate my-bundle x --device gpu"),
        (None, "chat google/gemma-4-E2B-it"),
    ],
)
def test_no_error_in_a_package_advises_pip(lost: str | None, words: str, home: Home) -> None:
    """Libraries are lost where a copy broke, or where another version made the package."""
    folder = home.folder / PLATFORM / SITE / str(lost)
    if lost:
        folder.rename(home.folder / lost)
    done = home.run(f"{PLATFORM}/bin/edge-run {words}")
    if lost:
        (home.folder / lost).rename(folder)
        assert f"make it anew, where it was made, with edge-export package {PLATFORM} -o FOLDER --backend onnx" in done.stderr
    assert (done.returncode, done.stderr[:7], "pip install" in done.stderr) == (1, "Error: ", False), done.stderr
