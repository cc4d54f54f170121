"""A released wheel: complete, with the kernels of every platform, of which each takes its own; it makes packages without a compiler."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edge_export.device_package.inventory import PLATFORMS
from edge_export.device_package.native_libraries import IN_PACKAGE
from edge_runtime.backends.kernels.build import TARGETS, library_name
from edge_runtime.backends.kernels.loader import NAME, usable_variants
from kept import ROOT

pytest.importorskip("hatchling", reason="needs hatchling (requirements/build.txt)")
pytest.importorskip("ziglang", reason="needs ziglang (requirements/build.txt)")

pytestmark = pytest.mark.slow(15)
PARTS = {"exporter": ("edge_export", "optimum"), "runtime": ("edge_runtime", "edge_bench"), "devices": ("edge_devices",)}
LIBRARIES = "edge_runtime/backends/kernels/lib"
# Prints the variants, and the kernels' libraries that are mapped.
LOADED = (
    "import json; from edge_runtime.backends.kernels.loader import usable_variants; names = usable_variants();"
    "maps = open('/proc/self/maps').read().split();"
    "print(json.dumps([names, sorted({word.rpartition('/')[2] for word in maps if 'libedge_rows' in word})]))"
)
# Runs edge-export as where ziglang is not installed.
EXPORT = "import sys; sys.modules['ziglang'] = None; from edge_devices.entry_points import edge_export; edge_export()"
# Kernels for macOS are compiled unoptimized, in a tenth of the time: nothing here runs them, and those for Linux, which other tests and
# packages have compiled already, are of the same sources.
BUILD = """
import subprocess, sys
sys.modules |= {MISSING}
def run(command, *, run=subprocess.run, **options):
    macos = any("macos" in word for word in command)
    return run(["-O0" if macos and word == "-O2" else word for word in command], **options)
subprocess.run = run
from hatchling.cli import hatchling
hatchling()
"""


def built(folder: Path, missing: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    hidden = BUILD.replace("MISSING", f"{missing!r}: None" if missing else "")
    command = [sys.executable, "-c", hidden, "build", "--target", "wheel", "--directory", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of `make dist`, unpacked."""
    folder = tmp_path_factory.mktemp("dist")
    done = built(folder, EDGE_MTP_KERNELS_FOR="all")
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = folder.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def run(wheel: Path, code: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs Python on the wheel's code, beside the libraries that are installed here; it writes no bytecode beside the wheel's files."""
    command = [sys.executable, "-B", "-c", code, *map(str, words)]
    return subprocess.run(command, cwd=wheel, env=os.environ | {"PYTHONPATH": str(wheel)}, capture_output=True, text=True, check=False)


def test_the_wheel_has_all_files_and_the_kernels_of_every_platform(wheel: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z", *PARTS], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    expected = {name.partition("/")[2] for name in tracked if name.split("/")[1:2] and name.split("/")[1] in PARTS[name.split("/")[0]]}
    there = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()}
    assert {name for name in there if ".dist-info/" not in name} == expected | {
        f"{LIBRARIES}/{library_name(target)}" for target in TARGETS.values()
    }
    assert {TARGETS["Linux", each.machine] for each in PLATFORMS.values()} <= {*TARGETS.values()}
    heads = {"so": b"\x7fELF", "dylib": b"\xcf\xfa\xed\xfe"}
    for path in (wheel / LIBRARIES).iterdir():
        assert path.read_bytes()[:4] == heads[path.suffix[1:]]
        assert path.stat().st_size > 1_000_000


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
def test_this_machine_takes_its_own_library_alone(wheel: Path) -> None:
    variants, loaded = json.loads(run(wheel, LOADED).stdout)
    assert (tuple(variants), loaded) == (usable_variants(), [NAME])


def test_each_system_asks_for_its_own_library(wheel: Path) -> None:
    code = (
        "import importlib, platform; from edge_runtime.backends.kernels import loader\n"
        f"for system, machine in {list(TARGETS)}:\n"
        "    platform.system, platform.machine = lambda: system, lambda: machine\n"
        "    print(importlib.reload(loader).NAME)"
    )
    assert run(wheel, code).stdout.split() == [library_name(target) for target in TARGETS.values()]


def test_a_package_is_made_of_the_wheel_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    """For another processor than this one; then the same without its library, as of a wheel that was built here for this machine."""
    other = PLATFORMS["linux-arm64" if platform.machine() == "x86_64" else "linux-x64"]
    library = wheel / LIBRARIES / library_name(TARGETS["Linux", other.machine])
    done = run(wheel, EXPORT, "package", other.name, "-o", tmp_path / "package")
    if "cannot be fetched" in done.stderr or "pip download failed" in done.stderr:
        pytest.skip(f"no package can be made here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    (packed,) = (tmp_path / "package" / IN_PACKAGE).iterdir()
    assert packed.name == library.name
    assert library.read_bytes()[64:].startswith(packed.read_bytes()[64:])  # but the list of sections, which is cut off
    listed = json.loads((tmp_path / "package/package.json").read_text())
    assert set(listed["row_kernels"]) == ({"neon", "dotprod", "i8mm"} if other.machine == "aarch64" else {"avx2", "avxvnni", "avx512vnni"})
    assert ("row kernels" in done.stdout, f"Row kernels: {', '.join(listed['row_kernels'])}" in done.stderr) == (True, True)
    away = tmp_path / library.name
    shutil.move(library, away)
    try:
        done = run(wheel, EXPORT, "package", other.name, "-o", tmp_path / "second")
        bare = run(wheel, EXPORT, "package", other.name, "-o", tmp_path / "third", "--without-kernels")
    finally:
        shutil.move(away, library)
    assert done.returncode == 1
    assert f"Error: this installation has no row kernels for {other.name}, and ziglang, which compiles them, is missing;" in done.stderr
    assert "pip install 'ziglang<0.18,>=0.17.1'" in done.stderr
    assert not (tmp_path / "second").exists()
    assert (bare.returncode, "No row kernels: standard operators." in bare.stderr) == (0, True)
    assert json.loads((tmp_path / "third/package.json").read_text())["row_kernels"] == []
    assert not list((tmp_path / "third").rglob("libedge_rows*"))


@pytest.mark.parametrize(
    ("wanted", "missing", "sentence"),
    [
        ("arm", "", "EDGE_MTP_KERNELS_FOR=arm is unknown; give all"),
        ("all", "ziglang", "EDGE_MTP_KERNELS_FOR=all needs ziglang, which is not installed here"),
    ],
)
def test_a_build_with_an_unknown_or_impossible_wish_ends(wanted: str, missing: str, sentence: str, tmp_path: Path) -> None:
    done = built(tmp_path, missing, EDGE_MTP_KERNELS_FOR=wanted)
    assert (done.returncode != 0, sentence in done.stderr) == (True, True)
    assert not list(tmp_path.glob("*.whl"))


def test_a_build_without_zig_is_pure_python_and_says_so(tmp_path: Path) -> None:
    done = built(tmp_path, "ziglang", EDGE_MTP_KERNELS_FOR="")
    assert (done.returncode, "no kernels are compiled for this machine; the stock operators will run" in done.stderr) == (0, True)
    (path,) = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        assert not [name for name in archive.namelist() if "libedge_rows" in name]
