"""numpy with a small BLAS: names are shortened in a library of headers and names alone; the emulated devices load the real one."""

from __future__ import annotations

import importlib.util
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from edge_export.device_package.debian import BLAS, take_small_blas
from edge_export.device_package.inventory import SITE, check_libraries, needed
from edge_export.device_package.wheels import copy_packages
from edge_export.errors import PackageError

OPENBLAS = "libscipy_openblas64_-7220728c.so"
ADDRESS = 0x10000


def library(needs: Sequence[str], names: Sequence[str]) -> bytes:
    """A 64-bit ELF file of one mapped segment with the dynamic section and the names, which it asks for but for the one with a slash."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in (*needs, *names))
    places = [strings.index(b"\0" + name.encode() + b"\0") + 1 for name in needs]
    start = 64 + 2 * 56
    entries = [*((1, place) for place in places), (5, 0), (10, len(strings)), (0, 0)]
    table = start + 16 * len(entries)
    entries[len(places)] = (5, ADDRESS + table)
    size = table + len(strings)
    segments = (1, 5, 0, ADDRESS, 0, size, size, 65536), (2, 6, start, ADDRESS + start, 0, 16 * len(entries), 16 * len(entries), 8)
    symbols = b"".join(struct.pack("<I20x", strings.index(b"\0" + name.encode() + b"\0") + 1) for name in names if "/" not in name)
    sections = struct.pack("<4xI16xQQ24x", 11, size, len(symbols))
    head = b"\x7fELF\x02\x01\x01".ljust(32, b"\0") + struct.pack("<QQ6xHHHHH", 64, size + len(symbols), 56, len(segments), 64, 1, 0)
    parts = [struct.pack("<IIQQQQQQ", *each) for each in segments] + [struct.pack("<QQ", *each) for each in entries]
    return b"".join((head, *parts, strings, symbols, sections))


def package(folder: Path, asked: Sequence[str], offered: Sequence[str]) -> Path:
    """A package with a numpy that asks for these names; returns its module."""
    module = folder / SITE / "numpy/_core/_multiarray_umath.cpython-311-aarch64-linux-gnu.so"
    for path, data in (
        (module, library([OPENBLAS, "libm.so.6"], [*asked, "scipy_openblas64/lib", "free"])),
        (folder / SITE / f"numpy.libs/{OPENBLAS}", b"large"),
        (folder / SITE / "numpy/linalg/_umath_linalg.cpython-311-aarch64-linux-gnu.so", b"lapack"),
        (folder / "lib" / BLAS, library([], offered)),
        (folder / "lib/libm.so.6", library([], [])),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return module


def test_numpy_asks_for_the_small_library_by_its_names(tmp_path: Path) -> None:
    module = package(tmp_path, ["scipy_cblas_sgemm64_", "scipy_cblas_cdotc_sub64_"], ["cblas_sgemm", "cblas_cdotc_sub"])
    size = module.stat().st_size
    take_small_blas(tmp_path)
    data = module.read_bytes()
    assert len(data) == size
    assert b"\0cblas_sgemm\0" in data
    assert b"\0cblas_cdotc_sub\0" in data
    assert needed(module) == [BLAS, "libm.so.6"]
    assert not list((tmp_path / SITE).glob("numpy.libs/*"))
    check_libraries(tmp_path)


@pytest.mark.parametrize(
    "asked",
    [["scipy_cblas_sgemm64_", name] for name in ("scipy_cblas_new64_", "scipy_dgemm_64_", "openblas_set_num_threads64_", "LAPACKE_dgesv")],
)
def test_a_name_that_the_small_library_lacks_is_refused(asked: list[str], tmp_path: Path) -> None:
    module = package(tmp_path, asked, ["cblas_sgemm"])
    before = module.read_bytes()
    with pytest.raises(
        PackageError, match=rf"asks for \S*{asked[1].removeprefix('scipy_').removesuffix('64_')}\S* beyond Debian's libblis4-serial"
    ):
        take_small_blas(tmp_path)
    assert module.read_bytes() == before


def test_a_library_that_is_not_in_the_package_is_named(tmp_path: Path) -> None:
    package(tmp_path, [], [])
    (tmp_path / SITE / f"numpy.libs/{OPENBLAS}").unlink()
    with pytest.raises(PackageError, match=rf"_multiarray_umath\S+ needs {OPENBLAS}, which the package lacks"):
        check_libraries(tmp_path)


def test_what_needs_lapack_says_that_it_is_not_there(tmp_path: Path) -> None:
    package(tmp_path, ["scipy_cblas_sgemm64_"], ["cblas_sgemm"])
    take_small_blas(tmp_path)
    spec = importlib.util.spec_from_file_location("_umath_linalg", tmp_path / SITE / "numpy/linalg/_umath_linalg.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module._ilp64 is False
    with pytest.raises(NotImplementedError, match="inv needs LAPACK, which is not in this package"):
        module.inv(1)


def test_what_a_device_runs_needs_no_lapack(tmp_path: Path) -> None:
    copy_packages(tmp_path)
    calls = re.compile(r"\b(linalg|polyfit|polynomial)\b|np\.(roots|poly)\b|multivariate_normal")
    assert [path.name for path in tmp_path.rglob("*.py") if calls.search(path.read_text(encoding="utf-8"))] == []
