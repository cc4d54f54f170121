"""Packed weights in files: later loads map them, and a file that is not what it should be changes no number and stops no load."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from kept import shipped_bundle

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_runtime.backends.kernels import packed_cache
from edge_runtime.backends.kernels.packed_cache import PackedCache, PackedSource, packed_files
from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.cli.run import main
from edge_runtime.session.open import open_session
from polling import packed_weights_written

if llama_library().row_kernels is None:
    pytest.skip("no row kernels here", allow_module_level=True)
TOKENS = list(range(50, 62))
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's list of mappings")


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "LEAST", 0)


@pytest.fixture(scope="module")
def bundle() -> Path:
    """The shipped pair with weights of 4 and 6 bits."""
    return shipped_bundle(target_quantization="q4_k_m")


@pytest.fixture(scope="module")
def source(bundle: Path) -> PackedSource:
    path = next(bundle.glob("target-*.gguf"))
    return PackedSource(path=path, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture(scope="module")
def expected(source: PackedSource) -> NDArray[np.float32]:
    """The logits [12, vocabulary] without a cache."""
    with target(source) as opened:
        return opened.verify(TOKENS).copy()


def target(source: PackedSource) -> LlamaTarget:
    return LlamaTarget(source.path, LlamaOptions(context=64, threads=1, batch=64, draft=False))


def mapped_bytes(line: str) -> int:
    """The bytes of a line of /proc/self/maps, if it is of a packed file."""
    first, last = (int(place, 16) for place in line.split(maxsplit=1)[0].split("-"))
    return last - first if ".packed" in line else 0


def logits(cache: PackedCache, source: PackedSource) -> tuple[NDArray[np.float32], int]:
    """Loads a target with the cache; returns its logits, and how many bytes of packed files this process has mapped."""
    with cache.loading(source):
        opened = target(source)
    with opened:
        mapped = sum(map(mapped_bytes, Path("/proc/self/maps").read_text().splitlines())) if sys.platform.startswith("linux") else 0
        result = opened.verify(TOKENS).copy()
    packed_weights_written()
    return result, mapped


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def only_file(cache: PackedCache) -> Path:
    """The one file in the folder, where nothing else is."""
    (name,) = names(cache.folder)
    return cache.folder / name


def test_a_second_load_gives_the_same_numbers_and_writes_nothing(
    cache: PackedCache, source: PackedSource, expected: NDArray[np.float32], said: list[str]
) -> None:
    first, _ = logits(cache, source)
    path = only_file(cache)
    before = path.stat()
    second, _ = logits(cache, source)
    assert np.array_equal(first, expected)
    assert np.array_equal(second, expected)
    assert (path.stat().st_ino, path.stat().st_ctime_ns > before.st_ctime_ns) == (before.st_ino, True), "used, not made anew"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert said == []


@linux
def test_both_loads_compute_on_the_files_pages(cache: PackedCache, source: PackedSource) -> None:
    first, second = logits(cache, source)[1], logits(cache, source)[1]
    size = only_file(cache).stat().st_size
    assert size / 2 < second <= size
    assert 0 < first <= second, "matrices that end in the last large page are not written while a model is loaded"


@linux
def test_a_second_load_reads_no_weights_of_the_source(cache: PackedCache, source: PackedSource, expected: NDArray[np.float32]) -> None:
    """Where the source's weights are other ones, as no bundle's may be that was checked, nobody notices."""
    logits(cache, source)
    changed = cache.folder.parent / "changed.gguf"
    data = np.fromfile(source.path, np.uint8)
    data[-4096:] ^= 1  # the last tensor's: a packed one
    data.tofile(changed)
    assert np.array_equal(logits(cache, PackedSource(path=changed, sha256=source.sha256))[0], expected)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def add_a_byte(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def at(place: int, value: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
            file.write(value)

    return change


def empty(path: Path) -> None:
    os.truncate(path, 0)


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


def put_a_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


DAMAGES = {
    "cut": cut,
    "longer": add_a_byte,
    "empty": empty,
    "of another version": at(8, b"\x7f"),
    "of another key": at(20, b"another!"),
    "its index elsewhere": at(48, bytes(8)),
    "its index damaged": at(-100, b"\xff" * 8),
    "open to others": open_to_others,
    "a link": put_a_link,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_is_none_is_made_anew(
    damage: Callable[[Path], None], cache: PackedCache, source: PackedSource, expected: NDArray[np.float32]
) -> None:
    logits(cache, source)
    path = only_file(cache)
    good = path.read_bytes()
    damage(path)
    assert np.array_equal(logits(cache, source)[0], expected)
    assert (only_file(cache), path.is_symlink(), path.read_bytes() == good) == (path, False, True)


def test_a_file_of_other_weights_is_not_taken_for_these(cache: PackedCache, source: PackedSource) -> None:
    """It is put in the place of another source's: the hash in it says whose it is."""
    logits(cache, source)
    mine = only_file(cache)
    content = mine.read_bytes()
    mine.unlink()
    other = PackedSource(path=source.path, sha256="0" * 64)
    logits(cache, other)
    theirs = only_file(cache)
    theirs.write_bytes(content)
    theirs.chmod(0o600)
    logits(cache, other)
    assert only_file(cache).read_bytes() != content


def test_two_may_write_at_once(cache: PackedCache, source: PackedSource, expected: NDArray[np.float32], said: list[str]) -> None:
    both = threading.Barrier(2, timeout=300)

    def load() -> NDArray[np.float32]:
        with cache.loading(source):
            both.wait()
            opened = target(source)
            both.wait()
        with opened:
            return opened.verify(TOKENS).copy()

    with ThreadPoolExecutor(2) as pool:
        results = [future.result() for future in [pool.submit(load) for _ in range(2)]]
    packed_weights_written()
    assert all(np.array_equal(result, expected) for result in results)
    assert np.array_equal(logits(cache, source)[0], expected)
    assert only_file(cache).suffix == ".packed"
    assert said == []


@pytest.mark.parametrize("room", [0, 1 << 12, 300_000])
def test_a_full_disk_costs_a_sentence(
    room: int, cache: PackedCache, source: PackedSource, expected: NDArray[np.float32], said: list[str]
) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        result, _ = logits(cache, source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert np.array_equal(result, expected)
    assert len(said) == 1
    assert "File too large" in said[0]
    assert names(cache.folder) == []


@pytest.mark.parametrize("kind", ["a file", "below a file", "open to others", "read-only"])
def test_a_folder_that_cannot_be_used_costs_a_sentence(
    kind: str, tmp_path: Path, source: PackedSource, expected: NDArray[np.float32], said: list[str]
) -> None:
    folder = tmp_path / "packed"
    if kind == "a file":
        folder.write_text("")
    elif kind == "below a file":
        folder.write_text("")
        folder = folder / "below"
    elif kind == "open to others":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere")
        folder.mkdir(mode=0o500)
    assert np.array_equal(logits(PackedCache(folder, said.append), source)[0], expected)
    assert len(said) == 1
    assert str(folder) in said[0]
    assert not folder.is_dir() or names(folder) == []


def test_what_a_killed_writer_left_goes(cache: PackedCache, source: PackedSource) -> None:
    cache.folder.mkdir(mode=0o700)
    (cache.folder / f".{'0' * 64}.packed.partial-999999999-00ff").write_bytes(b"half")
    logits(cache, source)
    assert only_file(cache).suffix == ".packed"


def test_what_was_used_longest_ago_goes(tmp_path: Path, source: PackedSource, said: list[str]) -> None:
    big = PackedCache(tmp_path / "packed", said.append)
    for name in "abc":
        logits(big, PackedSource(path=source.path, sha256=name * 64))
    size = packed_files(big.folder)[0][1]
    for age, (_, _, path) in enumerate(packed_files(big.folder)):
        os.utime(path, (1000 - age, 1000 - age))
    oldest, *kept = [path for _, _, path in packed_files(big.folder)]
    logits(PackedCache(big.folder, said.append, limit=int(3.5 * size)), PackedSource(path=source.path, sha256="d" * 64))
    left = [path for _, _, path in packed_files(big.folder)]
    assert oldest not in left
    assert set(kept) <= set(left)
    assert len(left) == 3
    assert said == []
    logits(PackedCache(big.folder, said.append, limit=1000), PackedSource(path=source.path, sha256="e" * 64))
    assert "may take 1.0 kB" in said[0]
    assert [path for _, _, path in packed_files(big.folder)] == left


def test_a_source_that_nobody_checked_is_known_by_its_state_too(tmp_path: Path, source: PackedSource) -> None:
    path = tmp_path / "target.gguf"
    shutil.copy(source.path, path)
    cache, copied = PackedCache(tmp_path / "packed", checked=False), PackedSource(path=path, sha256=source.sha256)
    for count in (1, 1):
        logits(cache, copied)
        assert len(packed_files(cache.folder)) == count
    os.utime(path, (1000, 1000))
    logits(cache, copied)
    assert len(packed_files(cache.folder)) == 2


def test_a_load_that_fails_leaves_nothing(cache: PackedCache, source: PackedSource) -> None:
    with pytest.raises(ZeroDivisionError), cache.loading(source), target(source):
        raise ZeroDivisionError
    assert names(cache.folder) == []


def test_a_session_keeps_packed_weights_that_are_counted_and_forgotten(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path))
    folder = packed_cache.default_folder()
    texts = []
    for kept in (False, True, True):
        with open_session(bundle, backend="llama", threads=1, context=256, packed_cache=kept) as session:
            texts.append(session.generate("def area", max_tokens=8).text())
        packed_weights_written()
        assert len(packed_files(folder)) == kept
    assert texts[0] == texts[1] == texts[2]
    diagnosis = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    bytes_ = only_file(PackedCache(folder)).stat().st_size
    assert diagnosis["packed_cache"] == {"folder": str(folder), "files": 1, "bytes": bytes_}
    (folder / "notes.txt").write_text("of somebody")
    result = CliRunner().invoke(main, ["forget", "--json"])
    assert json.loads(result.stdout)["packed_cache"] == {"folder": str(folder), "files": 1, "bytes": bytes_}
    assert names(folder) == ["notes.txt"]


def test_the_command_leaves_it_out(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path))
    words = ["generate", str(bundle), "-b", "llama", "-t", "1", "-n", "2", "-c", "256", "--prompt-cache", "off", "def area"]
    result = CliRunner().invoke(main, [*words, "--no-packed-cache"])
    assert result.exit_code == 0, result.output
    assert packed_files(packed_cache.default_folder()) == []
    assert CliRunner().invoke(main, words).stdout == result.stdout
    packed_weights_written()
    assert len(packed_files(packed_cache.default_folder())) == 1
