"""What comes from outside is named by its hash: what every set-up installs, the release's actions, the image's base."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from kept import ROOT

LOCKS = sorted(path for path in (ROOT / "requirements").glob("*.txt") if path.name != "overrides.txt")


def pins(lock: Path) -> dict[str, set[str]]:
    """The versions of each package; several where they depend on Python's."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)(?:\[[\w,]*\])?==([^ ;\\]+)", lock.read_text(), re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_every_package_of_a_lock_is_pinned_with_hashes(lock: Path) -> None:
    blocks = re.findall(r"^[^ #\n].*(?:\n .*)*", lock.read_text(), re.MULTILINE)
    assert blocks
    assert [block for block in blocks if not re.match(r"[\w.-]+==\S+( ; .*)? \\\n    --hash=sha256:[0-9a-f]{64}", block)] == []


@pytest.mark.parametrize("name", ["ci", "runtime", "tools"])
def test_locks_hold_no_torch_and_no_addresses(name: str) -> None:
    assert not re.search(r"^(torch|nvidia-)|://", (ROOT / f"requirements/{name}.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", ["build", "demo-llama", "demo-onnx", "llama", "test"])
def test_versions_are_those_that_all_tests_ran_on(name: str) -> None:
    every, own = pins(ROOT / "requirements/ci.txt"), pins(ROOT / f"requirements/{name}.txt")
    assert {package: own[package] for package in own.keys() & every.keys()} == {name: every[name] for name in own.keys() & every.keys()}
    assert name != "test" or own.keys() < every.keys() - {"llama-cpp-python", "transformers", "selenium"}


@pytest.mark.parametrize(("lock", "variable"), [("test.txt", "TEST_EXTRAS"), ("ci.txt", "ALL_EXTRAS")])
def test_the_lock_has_what_the_extras_ask_for(lock: str, variable: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    lists = {name: re.search(rf"^{name} := (.+)$", makefile, re.MULTILINE)[1] for name in ("TEST_EXTRAS", "ALL_EXTRAS")}
    expected = lists[variable].replace("$(TEST_EXTRAS)", lists["TEST_EXTRAS"]).split(",")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if variable == "ALL_EXTRAS":
        assert set(expected) == set(extras) - {"train", "openvino", "qnn"}  # installed by who has such a device; no test needs them
    names = {re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-") for extra in expected for requirement in extras[extra]}
    assert names - pins(ROOT / f"requirements/{lock}").keys() == ({"torch"} if variable == "ALL_EXTRAS" else set())


def test_what_builds_the_project_is_locked() -> None:
    locked = pins(ROOT / "requirements/build.txt")
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]:
        requirement = Requirement(line)
        assert all(Version(version) in requirement.specifier for version in locked[requirement.name])


@pytest.mark.parametrize(
    ("target", "lock"),
    [
        (("demo",), "requirements/demo-onnx.txt"),
        (("demo", "BACKEND=llama"), "requirements/demo-llama.txt"),
        (("test",), "requirements/test.txt"),
        (("test-all",), "requirements/ci.txt"),
    ],
)
def test_every_set_up_installs_a_lock(target: tuple[str, ...], lock: str) -> None:
    assert {setup for line in planned(*target) for setup in re.findall(r"LOCK=(\S+) .*setup\.sh", line)} == {lock}


def test_a_release_has_the_kernels_of_every_platform() -> None:
    (build,) = (line for line in planned("release") if "-m build" in line)
    assert "EDGE_MTP_KERNELS_FOR=all" in build


def planned(*target: str) -> list[str]:
    """What make would run in a fresh clone."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    words = ["make", "--dry-run", "--always-make", *target]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_actions_and_the_base_image_are_named_by_hash() -> None:
    used = [line for path in (ROOT / ".github/workflows").glob("*.yml") for line in re.findall(r"uses: (.*)", path.read_text())]
    images = re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert used
    assert images
    assert [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", line)] == []
    assert len({image for image in images if re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", image)}) == 1 == len({*images})
