"""Any changed byte of a bundle is refused, and the quick check is quick without believing what it never hashed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.bundle import bundle
from edge_runtime.bundle.bundle import CHECK_MODES, SAMPLE_BYTES, SAMPLES, is_intact, open_bundle, read_part, samples_of
from edge_runtime.bundle.manifest import with_hash
from edge_runtime.errors import BundleError

DATA = Path(__file__).parents[2] / "data" / "manifest-2.json"
NAMES = ("target.gguf", "drafter.gguf", "tokenizer.json")
# Larger than all samples together, so that some bytes are in none.
LARGE = 3 * SAMPLES * SAMPLE_BYTES


@pytest.fixture(autouse=True)
def own_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_MTP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def make_bundle(folder: Path, size: int = 300) -> Path:
    folder.mkdir()
    record = json.loads(DATA.read_text())
    record["files"] = []
    for number, name in enumerate(NAMES):
        content = hashlib.shake_128(bytes([number])).digest(size)
        (folder / name).write_bytes(content)
        role = name.partition(".")[0]
        record["files"].append({"path": name, "role": role, "format": "gguf", "bytes": size, "sha256": hashlib.sha256(content).hexdigest()})
    (folder / "manifest.json").write_text(with_hash(record))
    return folder


def settle(monkeypatch: pytest.MonkeyPatch, *, seconds: float = 3) -> None:
    """The clock stands so long after this moment: by default so long that the files' times are settled."""
    now = time.time_ns() + int(seconds * 10**9)
    monkeypatch.setattr(bundle.time, "time_ns", lambda: now)


def flip(path: Path, place: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(NAMES), place=st.integers(0, 299), bit=st.integers(0, 7), mode=st.sampled_from(("fast", "full")))
def test_any_flipped_bit_is_refused(tmp_path_factory: pytest.TempPathFactory, name: str, place: int, bit: int, mode) -> None:
    folder = make_bundle(tmp_path_factory.mktemp("flipped") / "bundle")
    open_bundle(folder, check=mode)
    flip(folder / name, place, bit)
    with pytest.raises(BundleError, match=rf"{name} does not have the sha256 of the manifest"):
        open_bundle(folder, check=mode)
    assert open_bundle(folder, check="none")


@pytest.mark.parametrize("mode", CHECK_MODES)
@pytest.mark.parametrize("harm", ["truncated", "longer", "missing", "folder"])
def test_what_no_mode_takes(tmp_path: Path, mode, harm: str) -> None:
    folder = make_bundle(tmp_path / "bundle")
    open_bundle(folder, check=mode)
    path = folder / "drafter.gguf"
    content = path.read_bytes()
    path.unlink()
    if harm == "truncated":
        path.write_bytes(content[:-1])
    elif harm == "longer":
        path.write_bytes(content + b"\0")
    elif harm == "folder":
        path.mkdir()
    with pytest.raises(BundleError, match=r"drafter\.gguf"):
        open_bundle(folder, check=mode)


@pytest.mark.parametrize("mode", ["fast", "full"])
def test_swapped_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode) -> None:
    folder = make_bundle(tmp_path / "bundle")
    settle(monkeypatch)
    open_bundle(folder, check=mode)
    (folder / "target.gguf").rename(folder / "x")
    (folder / "drafter.gguf").rename(folder / "target.gguf")
    (folder / "x").rename(folder / "drafter.gguf")
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(folder, check=mode)


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes the files that are hashed whole from now on."""
    observed: list[str] = []
    own = bundle.sha256_of
    monkeypatch.setattr(bundle, "sha256_of", lambda path: observed.append(path.name) or own(path))
    return observed


def test_fast_hashes_a_file_once_and_full_always(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_bundle(tmp_path / "bundle")
    settle(monkeypatch)
    observed = hashed(monkeypatch)
    open_bundle(folder)
    assert sorted(observed) == sorted(NAMES)
    open_bundle(folder)
    open_bundle(folder, check="none")
    assert len(observed) == 3
    open_bundle(folder, check="full")
    assert len(observed) == 6
    copied = shutil.copytree(folder, tmp_path / "copied")
    open_bundle(copied)
    assert len(observed) == 9, "a copy is hashed itself"


def test_times_that_were_set_back_do_not_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_bundle(tmp_path / "bundle", LARGE)
    settle(monkeypatch)
    open_bundle(folder)
    path = folder / "target.gguf"
    before = path.stat()
    place = SAMPLE_BYTES + 1  # between the first two samples
    samples = samples_of(path)
    flip(path, place)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert samples_of(path) == samples
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(folder)


def test_samples_spread_from_the_first_byte_to_the_last_see_a_disk_that_changes_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_bundle(tmp_path / "bundle", LARGE) / "target.gguf"
    sha256 = bundle.sha256_of(path)
    settle(monkeypatch)
    same = bundle._identity(path)
    monkeypatch.setattr(bundle, "_identity", lambda _: same)  # the system notices nothing
    for number in range(SAMPLES):
        place = number * (LARGE - 1) // (SAMPLES - 1)
        assert is_intact(path, sha256, "fast")
        flip(path, place)
        assert not is_intact(path, sha256, "fast"), place
        flip(path, place)


def test_as_many_samples_are_taken_as_the_documentation_says() -> None:
    text = (Path(__file__).parents[3] / "docs/security.md").read_text()
    assert f"{SAMPLES} hashed samples of {SAMPLE_BYTES >> 10} kB" in text.replace("\n", " ")


@pytest.mark.parametrize("changed_s", [-100, 100])
def test_a_file_that_just_changed_is_hashed_again_whatever_its_other_times_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed_s: int
) -> None:
    path = make_bundle(tmp_path / "bundle") / "target.gguf"
    settle(monkeypatch, seconds=3 if changed_s > 0 else 0)
    now = time.time_ns() + changed_s * 10**9
    os.utime(path, ns=(now, now))
    observed = hashed(monkeypatch)
    sha256 = bundle.sha256_of(path)
    assert [is_intact(path, sha256, "fast"), is_intact(path, sha256, "fast")] == [True, True]
    assert len(observed) == 3


def test_parts_that_are_too_large_or_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(bytes(11))
    assert read_part(tmp_path / "part", 11, "table") == bytes(11)
    with pytest.raises(BundleError, match=r"part cannot be read as a table \(it has more than 10 bytes\)"):
        read_part(tmp_path / "part", 10, "table")
    with pytest.raises(BundleError, match=r"none cannot be read as a table \(No such file"):
        read_part(tmp_path / "none", 10, "table")


@pytest.mark.parametrize("memory", ["", "[]", "{}", '{"key": 5}', "\0"])
def test_a_damaged_memory_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    folder = make_bundle(tmp_path / "bundle")
    settle(monkeypatch)
    path = Path(os.environ["EDGE_MTP_CACHE"]) / bundle.CHECKED_NAME
    path.write_text(memory)
    open_bundle(folder)
    flip(folder / "target.gguf", 5)
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(folder)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_bundle(tmp_path / "bundle")

    def broken(_: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(bundle, "sha256_of", broken)
    with pytest.raises(BundleError, match=r"target\.gguf cannot be read \(Input/output error\); check the disk"):
        open_bundle(folder)
