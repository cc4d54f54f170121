"""The parts of a device package that need no network: launchers, wheels, the inventory, and what the command refuses."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import install_opener

import pytest
from click.testing import CliRunner
from rich.console import Console

from edge_devices.files.atomic_write import locked
from edge_devices.files.limited_read import sha256_of
from edge_devices.waiting import Report, no_report
from edge_export.cli.command import main
from edge_export.cli.display import Steps
from edge_export.device_package import build as making
from edge_export.device_package import debian, native_libraries, wheels
from edge_export.device_package.inventory import PLATFORMS, SITE, Inventory, check_pages, cut_symbols, take_inventory, write_file
from edge_export.device_package.wheels import add_own_code, write_launchers
from edge_export.errors import ExportError, PackageError
from edge_export.output import check_output

LINUX = PLATFORMS["linux-arm64"]
INVENTORY = Inventory(platform="linux-arm64", version="1", backends=("onnx",))


def package_with_echo(folder: Path, cpuinfo: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose loader prints its arguments, one a line, and whose launcher reads this cpuinfo."""
    write_launchers(folder, LINUX, ("llama", "onnx"))
    loader = folder / "lib" / LINUX.loader
    loader.parent.mkdir()
    loader.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nprintf "%s\\n" "${LD_LIBRARY_PATH-none} ${PYTHONPATH-none}"\n')
    loader.chmod(0o755)
    (folder / "cpuinfo").write_text(cpuinfo)
    launcher = folder / "bin/edge-python"
    launcher.write_text(launcher.read_text().replace("/proc/cpuinfo", f'"{folder}/cpuinfo"'))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    return folder


def output_of(command: Sequence[str | Path], folder: Path | None = None) -> list[str]:
    return subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize(
    ("features", "build"),
    [
        ("fp asimd evtstrm crc32 cpuid", "armv8"),
        ("fp asimd asimddp", "armv8"),  # the dotprod build uses half floats, too
        ("fp asimdhp asimddp", "dotprod"),
        ("asimddp2 asimdhp crc32", "armv8"),
        ("asimdhp i8mm bf16 asimddp", "dotprod"),
    ],
)
def test_launcher_takes_the_newest_build_that_the_processor_runs(
    features: str, build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = package_with_echo(tmp_path / "a b'c", f"processor\t: 0\nBogoMIPS\t: 1\nFeatures\t: {features}\nCPU part\t: 1\n", monkeypatch)
    words = output_of([folder / "bin/edge-python", "-c", "print('$HOME `x`')", "*"])
    libraries = words[words.index("--library-path") + 1].split(":")
    assert libraries[0] == f"{folder}/lib/llama-{build}"
    assert words[-5:-1] == ["-s", "-c", "print('$HOME `x`')", "*"]
    assert words[words.index("--argv0") + 1] == f"{folder}/bin/edge-python"
    assert words[-1] == "none none"  # libraries and modules of another Python stay outside


@pytest.mark.parametrize("shell", ["dash", "mksh", "bash"])
def test_launchers_are_read_by_the_shells_of_devices(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """dash is Debian's /bin/sh, mksh Android's."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    folder = package_with_echo(tmp_path / "package", "processor : 0\nFeatures : fp asimdhp asimddp\n", monkeypatch)
    write_launchers(folder, PLATFORMS["android-arm64"], ("onnx",))
    words = output_of([shell, folder / "bin/edge-python", "a b"])
    assert words[-2:] == ["a b", "none none"]
    assert words[words.index("--library-path") + 1] == f"{folder}/lib"


def test_launchers_find_their_folder_through_links_and_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = package_with_echo(tmp_path / "package", "Features : fp\n", monkeypatch)
    (tmp_path / "link").symlink_to(folder / "bin/edge-run")
    for command, place in ((["./edge-run", "x"], folder / "bin"), ([tmp_path / "link", "x"], None), (["bin/edge-run", "x"], folder)):
        words = output_of(command, place)
        assert str(folder / "bin/python3.11") in words
        assert words[-2] == "x"
        assert "edge_run()" in words[-3]


def wheel(folder: Path, members: dict[str, str]) -> Path:
    path = folder / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


ABOUT = "Metadata-Version: 2.1\nName: Thing\nVersion: 1.0\nClassifier: License :: OSI Approved :: MIT License\n"


def test_wheel_is_unpacked_without_tests_and_with_its_licence(tmp_path: Path) -> None:
    members = {
        "thing/__init__.py": "",
        "thing/tests/test_it.py": "",
        "thing/x.pyi": "",
        "thing/data.json": "{}",
        "thing/license_check.py": "",
        "thing-1.0.dist-info/METADATA": ABOUT,
        "thing-1.0.dist-info/RECORD": "",
        "thing-1.0.dist-info/licenses/LICENSE": "MIT text",
    }
    component = wheels._add_wheel(tmp_path / "p", wheel(tmp_path, members))
    kept = {path.relative_to(tmp_path / "p").as_posix() for path in (tmp_path / "p").rglob("*") if path.is_file()}
    site = "lib/python3/dist-packages"
    assert kept == {
        f"{site}/thing/__init__.py",
        f"{site}/thing/data.json",
        f"{site}/thing/license_check.py",
        f"{site}/thing-1.0.dist-info/METADATA",
        f"{site}/thing-1.0.dist-info/licenses/LICENSE",
        "licences/thing/LICENSE",
    }
    assert (component.name, component.version, component.licence) == ("thing", "1.0", "MIT License")
    assert component.texts == ("licences/thing/LICENSE",)


@pytest.mark.parametrize("name", ["../outside.py", "/outside.py", "thing/../../outside.py"])
def test_wheel_that_leads_out_of_the_package_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="is outside the package"):
        wheels._add_wheel(tmp_path / "p", wheel(tmp_path, {"thing-1.0.dist-info/METADATA": ABOUT, name: ""}))
    assert not (tmp_path / "outside.py").exists()


def test_own_code_is_the_light_packages(tmp_path: Path) -> None:
    component = add_own_code(tmp_path, ("onnx", "serve"))
    site = tmp_path / "lib/python3/dist-packages"
    assert sorted(path.name for path in site.iterdir() if not path.name.endswith(".dist-info")) == [
        "edge_bench",
        "edge_devices",
        "edge_runtime",
    ]
    assert not [path for path in site.rglob("*") if "__pycache__" in path.parts or path.suffix in {".so", ".cpp", ".h"}]
    assert "Apache License" in (tmp_path / component.texts[0]).read_text()
    about = next(site.glob("*.dist-info/METADATA")).read_text()
    assert f"Version: {version('edge-mtp')}\n" in about
    assert [line for line in about.splitlines() if "starlette" in line] == ['Requires-Dist: starlette<2,>=1.10; extra == "serve"']
    assert not [word for word in ("edge-export", "llguidance", "numpy") if word in about]  # what a device does not have, or has anyway


def elf(*aligns: int, skew: int = 0, kind: int = 1) -> bytes:
    """A 64-bit ELF file with nothing but its headers; `skew`: bytes between address and offset, beyond the alignment."""
    head = b"\x7fELF\x02\x01\x01".ljust(32, b"\0") + struct.pack("<Q14xHHHHH", 64, 56, len(aligns), 0, 0, 0)
    return head + b"".join(struct.pack("<IIQQQQQQ", kind, 5, 0, align + skew, 0, 64, 64, align) for align in aligns)


def test_programs_and_libraries_suit_the_pages_of_the_platform(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/fine.so").write_bytes(elf(65536, 16384))
    (tmp_path / "lib/note.so").write_bytes(elf(65536) + b"more")
    (tmp_path / "lib/a.py").write_text("")
    (tmp_path / "lib/link").symlink_to("nowhere")
    assert check_pages(tmp_path, LINUX.page_bytes) == 2
    (tmp_path / "lib/notes.so").write_bytes(elf(8, kind=4))  # what is not mapped may lie anywhere
    assert check_pages(tmp_path, LINUX.page_bytes) == 3
    for wrong in (elf(65536, 4096), elf(0), elf(16384, skew=4096)):
        (tmp_path / "lib/wrong.so").write_bytes(wrong)
        with pytest.raises(PackageError, match=r"lib/wrong\.so is aligned to \d+ bytes and .* pages of 16384"):
            check_pages(tmp_path, LINUX.page_bytes)
    (tmp_path / "lib/wrong.so").write_bytes(elf(4096))
    assert check_pages(tmp_path, PLATFORMS["linux-x64"].page_bytes) == 4


def test_what_no_kernel_maps_is_cut_off(tmp_path: Path) -> None:
    mapped = bytearray(elf(16384).ljust(200, b"x"))
    struct.pack_into("<Q", mapped, 64 + 32, 200)  # p_filesz
    sections = mapped.copy()
    struct.pack_into("<Q", sections, 40, 300)
    struct.pack_into("<HH", sections, 60, 9, 8)
    (tmp_path / "lib.so").write_bytes(sections + b"symbols")
    (tmp_path / "text.py").write_text("")
    assert cut_symbols(tmp_path) == len(b"symbols")
    assert (tmp_path / "lib.so").read_bytes() == mapped
    assert cut_symbols(tmp_path) == 0


@pytest.mark.parametrize(
    "damaged", [b"\x7fELF", elf(16384)[:80], b"\x7fELF\x01" + elf(16384)[5:], elf(16384)[:54] + b"\0\0" + elf(16384)[56:]]
)
def test_a_damaged_program_is_named(damaged: bytes, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(damaged)
    with pytest.raises(PackageError, match=r"lib\.so is no .*ELF file"):
        check_pages(tmp_path, 16384)


def test_inventory_names_every_file_with_its_hash(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/edge-python").write_bytes(b"abc")
    (tmp_path / "bin/edge-python").chmod(0o755)
    inventory = take_inventory(tmp_path, INVENTORY)
    reported = json.loads((tmp_path / "package.json").read_text())
    assert reported["files"] == [
        {"path": "bin/edge-python", "bytes": 3, "sha256": sha256_of(tmp_path / "bin/edge-python"), "executable": True}
    ]
    assert reported["sizes"] == {"launchers": 3}
    assert (reported["schema"], reported["platform"], sum(file.bytes for file in inventory.files)) == (2, "linux-arm64", 3)


def test_a_package_built_on_windows_is_the_same(tmp_path: Path) -> None:
    """Windows keeps no mark of what can be started, and writes lines of text with another end."""
    write_launchers(tmp_path, LINUX, ("onnx",))
    for name in (f"lib/{LINUX.loader}", "lib/libc.so.6", "tools/llama-bench"):
        write_file(tmp_path / name, b"")
    for path in tmp_path.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    listed = take_inventory(tmp_path, INVENTORY).files
    started = {"bin/edge-python", "bin/edge-run", "bin/edge-bench", "bin/edge-devices", f"lib/{LINUX.loader}", "tools/llama-bench"}
    assert {file.path for file in listed if file.executable} == started
    texts = {path.name: path.read_text(encoding="utf-8") for path in Path(str(making.__file__)).parent.glob("*.py")}
    del texts["native_libraries.py"]  # it writes compilers' wrappers for this machine
    assert [name for name, text in texts.items() if re.search(r"\.write_text\(|open\([^)]*[\"']w[\"']", text)] == []


def test_wheels_are_older_than_the_bundled_c_library() -> None:
    """Debian 12's is 2.36: a wheel for a newer one would not load."""
    for platform in PLATFORMS.values():
        assert max(int(tag.split("_")[2]) for tag in platform.wheel_tags if tag.startswith("manylinux_2_")) <= 36


def run_command(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["package", *words])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["linux-arm64"], "Missing option '-o'"),
        (["linux-x64", "-o", "x", "--backend", "llama"], "llama.cpp is not compiled for linux-x64 yet"),
        (["linux-x64", "-o", "x", "--with-llama-tools"], "llama.cpp is not compiled for linux-x64 yet"),
        (["windows"], "is not one of"),
    ],
)
def test_options_that_do_not_fit_are_usage_errors(words: list[str], reason: str) -> None:
    status, output = run_command(*words)
    assert status == 2
    assert reason in output


def deb(files: dict[str, bytes], links: dict[str, str]) -> bytes:
    """A package as Debian makes them: an ar archive whose third member is the files' tar.xz."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"./{name}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        for name, target in links.items():
            entry = tarfile.TarInfo(f"./{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    members = (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", packed.getvalue()))
    heads = ((f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode(), data) for name, data in members)
    return b"!<arch>\n" + b"".join(head + data + b"\n" * (len(data) % 2) for head, data in heads)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> debian.Mirror:
    """A mirror in a folder, with two versions of a package; no program is on PATH, gpgv and apt among them."""
    root = tmp_path / "mirror"
    for place, suite, number in (("debian", "bookworm", 9), ("debian-security", "bookworm-security", 14)):
        name = f"pool/main/t/thing_1-1+deb12u{number}_arm64.deb"
        library = {f"usr/lib/libthing.so.1.{number}": b"bytes"}
        archive = deb(library, {"usr/lib/libthing.so.1": f"libthing.so.1.{number}", "usr/lib/away": "../../../../etc/passwd"})
        stanza = f"Package: thing\nVersion: 1-1+deb12u{number}\nFilename: {name}\nSHA256: {hashlib.sha256(archive).hexdigest()}\n\n"
        listing = lzma.compress(f"Package: thing-dev\nVersion: 9\n\n{stanza}".encode())
        release = f"Suite: x\nSHA256:\n {hashlib.sha256(listing).hexdigest()} {len(listing)} main/binary-arm64/Packages.xz\n"
        for path, data in (
            (name, archive),
            (f"dists/{suite}/main/binary-arm64/Packages.xz", listing),
            (f"dists/{suite}/InRelease", release),
        ):
            write_file(root / place / path, data.encode() if isinstance(data, str) else data)
    monkeypatch.setenv("PATH", "/nowhere")
    return debian.Mirror(url=root.as_uri(), keyring=tmp_path / "none")


def fetch(mirror: debian.Mirror, cache: Path) -> Path:
    return debian.fetch_archives(("thing",), "arm64", cache, mirror)["thing"]


def test_packages_of_debian_are_read_without_its_programs(mirror: debian.Mirror, tmp_path: Path) -> None:
    archive = fetch(mirror, tmp_path)
    assert archive.name == "thing_1-1+deb12u14_arm64.deb"  # the newer one
    unpacked = debian.DebianArchive(archive)
    assert unpacked.names("usr/lib") == ["usr/lib/away", "usr/lib/libthing.so.1", "usr/lib/libthing.so.1.14"]
    assert unpacked.read("usr/lib/libthing.so.1") == b"bytes"
    assert unpacked.read("usr/lib/away") is None
    shutil.rmtree(tmp_path / "mirror/debian-security/pool")
    assert fetch(mirror, tmp_path) == archive  # what was fetched is kept


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        ("debian-security/pool/main/t/thing_1-1+deb12u14_arm64.deb", "sha256 is another"),
        ("debian/dists/bookworm/main/binary-arm64/Packages.xz", "sha256 is another"),
        ("debian/dists/bookworm/InRelease", "names no main/binary-arm64/Packages.xz"),
    ],
)
def test_what_is_not_what_the_lists_say_is_refused(damaged: str, reason: str, mirror: debian.Mirror, tmp_path: Path) -> None:
    (tmp_path / "mirror" / damaged).write_bytes(b"damaged")
    with pytest.raises(PackageError, match=reason):
        fetch(mirror, tmp_path)
    assert not list(tmp_path.glob("debian-*/thing*"))


@pytest.mark.parametrize("archive", [b"", b"!<arch>\n", deb({}, {})[:200], deb({}, {}).replace(b"4         `", b"-60       `")])
def test_a_damaged_archive_is_one_sentence(archive: bytes, tmp_path: Path) -> None:
    (tmp_path / "a_1_arm64.deb").write_bytes(archive)
    with pytest.raises(PackageError, match=r"a_1_arm64\.deb is no package of Debian"):
        debian.DebianArchive(tmp_path / "a_1_arm64.deb")


@pytest.mark.skipif(shutil.which("gpgv") is None, reason="gpgv is not installed")
def test_a_wrong_signature_is_refused_where_it_is_checked(mirror: debian.Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "keyring.gpg").write_bytes(b"")
    with pytest.raises(PackageError, match=r"signature of bookworm\.InRelease is wrong \(gpgv: NODATA\)"):
        fetch(replace(mirror, keyring=tmp_path / "keyring.gpg"), tmp_path)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("PLAINTEXT GOODSIG VALIDSIG ERRSIG NO_PUBKEY", None),
        ("PLAINTEXT ERRSIG NO_PUBKEY", "no valid key for .*; upgrade the package debian-archive-keyring"),
        ("PLAINTEXT EXPKEYSIG VALIDSIG", "no valid key for "),
        ("PLAINTEXT REVKEYSIG VALIDSIG", "is wrong .*none is good"),
        ("PLAINTEXT GOODSIG BADSIG", "is wrong .*BADSIG"),
        ("PLAINTEXT GOODSIG PLAINTEXT NO_PUBKEY", "is wrong"),
    ],
)
def test_a_key_of_the_keyring_is_enough(
    words: str, reason: str | None, mirror: debian.Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpgv ends with 2 where a keyring lacks any of the keys that sign."""
    lines = "".join(f"echo '[GNUPG:] {word} text' >&2\n" for word in words.split())
    program = tmp_path / "bin/gpgv"
    write_file(program, f'#!/bin/sh\n{lines}while read -r line; do echo " ${{line}}"; done < "${{8}}"\nexit 2\n'.encode(), executable=True)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(PackageError, match=reason) if reason else contextlib.nullcontext():
        fetch(replace(mirror, keyring=program), tmp_path)


def test_a_download_that_cannot_be_kept_is_no_failure_of_the_network(mirror: debian.Mirror, tmp_path: Path) -> None:
    kept = fetch(mirror, tmp_path).parent / "bookworm.InRelease"
    before = kept.read_bytes()
    with pytest.raises(PackageError, match=r"InRelease cannot be fetched \(more than 10 bytes"):
        fetch(replace(mirror, max_bytes=10), tmp_path)
    assert kept.read_bytes() == before
    kept.unlink()
    kept.mkdir()
    with pytest.raises(PackageError, match=r"bookworm\.InRelease cannot be written .*; make room"):
        fetch(mirror, tmp_path)


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The words of a command that finds no network."""
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path / "cache"))
    install_opener(None)  # the next one reads the environment
    yield ["-o", str(tmp_path / "package")]
    install_opener(None)


@pytest.mark.parametrize("replaced", [False, True], ids=["new", "an old package"])
def test_an_unreachable_mirror_is_one_sentence_and_changes_nothing(replaced: bool, away: list[str], tmp_path: Path) -> None:
    old = tmp_path / "package"
    if replaced:
        write_file(old / "bin/edge-python", b"old")
        take_inventory(old, INVENTORY)
    before = old.exists(), sorted(old.rglob("*"))
    status, output = run_command("linux-arm64", *away, "--without-kernels", "--force")
    assert (status, "InRelease cannot be fetched" in output) == (1, True)
    assert (old.exists(), sorted(old.rglob("*"))) == before
    assert {path.name for path in tmp_path.iterdir()} <= {"package", "cache"}
    assert not replaced or (old / "bin/edge-python").read_text() == "old"


def test_unreachable_index_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PIP_INDEX_URL": f"file://{tmp_path}/none",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PackageError, match=r"download failed .*check the network"):
        wheels.add_wheels(tmp_path / "p", LINUX, ("onnx",), tmp_path)


@pytest.mark.parametrize("media", [True, False])
def test_wheels_decode_images_and_sound_where_asked(media: bool, tmp_path: Path) -> None:
    request = making.PackageRequest(platform=LINUX.name, output=tmp_path, backends=("llama", "onnx"), media=media)
    names = [re.split("[<>=!~]", word)[0] for word in wheels.wheel_requirements(request.extras)]
    assert ({"pillow", "soundfile", "cffi"} & {*names} == {"pillow", "soundfile", "cffi"}) is media
    assert {"typing_extensions", "numpy"} <= {*names}
    assert names.count("typing_extensions") == 1


# Has compiled half when a half was reported, or after a minute.
CMAKE = """\
#!/bin/sh
echo "$*" >> "$0.log"
case "$*" in
  *" -- -n") printf 'ninja: Entering directory\\n[1/2] compile\\n[2/2] link\\n' ;;
  "--build "*)
    build=$2; mkdir -p "$build/bin"; shift 5
    echo entry >> "$build/.ninja_log"
    half="$0.half.$(grep -c '^-S' "$0.log")"
    for wait in $(seq 3000); do test -e "$half" && break; sleep 0.02; done
    echo entry >> "$build/.ninja_log"
    for target; do
      test $target = llama && target="llama ggml ggml-base ggml-cpu"
      for name in $target; do printf $name > "$build/bin/lib$name.so"; done
    done ;;
esac
"""


def test_llama_cpp_comes_with_its_media_library(tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="needs edge-mtp[package]")
    shares: list[list[float]] = []
    sources = tmp_path / "llama_cpp_python-0"
    for path in ("llama_cpp/mtmd_cpp.py", "llama_cpp/server/app.py", "LICENSE.md", "vendor/llama.cpp/LICENSE"):
        write_file(sources / path, b"text")
    write_file(tmp_path / f"{sources.name}.tar.gz", b"archive")
    write_file(tmp_path / "cmake", CMAKE.encode(), executable=True)
    toolchain = native_libraries.Toolchain(
        zig=tmp_path / "zig", cmake=str(tmp_path / "cmake"), ninja="ninja", home=tmp_path, sources=sources
    )

    def step(_: str) -> Callable[..., None]:
        shares.append([])
        return report

    def report(share: float, _: str = "") -> None:
        shares[-1].append(share)
        if share == 0.5:
            (tmp_path / f"cmake.half.{len(shares)}").touch()

    native_libraries.add_llama(tmp_path / "p", LINUX, toolchain, step)
    assert len(shares) == 2  # for each kind of processor
    assert all(each == sorted(each) and each[-1] == 1.0 and 0.5 in each for each in shares)
    folder = tmp_path / "p" / SITE / "llama_cpp"
    assert (folder / "lib/libmtmd.so").read_text() == "mtmd"
    assert (folder / "mtmd_cpp.py").is_file()
    assert not (folder / "server").exists()
    assert "Version: 0.3.36\n" in (folder.parent / "llama_cpp_python-0.3.36.dist-info/METADATA").read_text()  # by which a doctor finds it
    configured = [line.split() for line in (tmp_path / "cmake.log").read_text().splitlines() if line.startswith("-S")]
    assert len(configured) == 2
    assert all({"-DLLAMA_BUILD_MTMD=ON", "-DMTMD_VIDEO=OFF"} <= set(words) for words in configured)


@pytest.fixture
def no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This installation has no kernels for other machines, as a checkout."""
    monkeypatch.setattr(native_libraries, "LIBRARIES", tmp_path / "none")


def test_zig_compiles_what_the_installation_lacks_and_says_how_far_it_is(
    no_kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ziglang", reason="needs edge-mtp[package]")
    compiled: list[str] = []

    def compile_two(target: str, folder: Path, *, cache: Path, report: Callable[[float], None]) -> None:
        for done in (0.5, 1.0):
            report(done)
        compiled.append(f"{target} {folder.relative_to(tmp_path)} {cache.relative_to(tmp_path)}")

    monkeypatch.setattr(native_libraries, "build", compile_two)
    with Steps(Console(file=(out := io.StringIO()))) as step:
        assert native_libraries.add_kernels(tmp_path / "p", LINUX, tmp_path / "cache", step) == ("neon", "dotprod", "i8mm")
    assert compiled == [f"aarch64-linux-gnu.2.17 p/{native_libraries.IN_PACKAGE} cache/zig"]
    title = "row kernels for aarch64 (minutes the first time, then kept)"
    assert out.getvalue().splitlines() == [title, f"{title}: 50 %", f"{title}: 100 %"]


def test_without_zig_nothing_is_begun(no_kernels: None, away: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment without zig, as that of make demo: the command ends before it downloads anything."""
    monkeypatch.setitem(sys.modules, "ziglang", None)
    assert run_command("android-arm64", *away) == (
        1,
        "Error: this installation has no row kernels for android-arm64, and ziglang, which compiles them, is missing;"
        " pip install 'ziglang<0.18,>=0.17.1', or give --without-kernels, with which standard operators run, which are slower\n",
    )
    status, output = run_command("android-arm64", *away, "--without-kernels")
    assert (status, "cannot be fetched" in output) == (1, True)  # it went on
    status, output = run_command("android-arm64", *away, "--without-kernels", "--backend", "llama")
    assert (status, "ziglang, which compiles llama.cpp for the device, is missing; pip install 'edge-mtp[package]'" in output) == (1, True)


@pytest.mark.parametrize(
    ("platform", "backends"), [("android-arm64", ("llama", "onnx")), ("linux-x64", ("onnx",)), ("linux-arm64", ("llama",))]
)
def test_a_readme_has_four_commands_for_its_device(platform: str, backends: tuple[str, ...], tmp_path: Path) -> None:
    making.write_readme(tmp_path, PLATFORMS[platform], "my package", "9.9", backends, ("neon",))
    text = (tmp_path / "README.md").read_text()
    copy, *rest = re.findall("^    (.*)$", text, re.MULTILINE)
    assert copy == making.copy_command(PLATFORMS[platform], "my package")
    assert [line.split()[:4] for line in rest] == [
        ["'my", f"package'/bin/{command}", action, "my-bundle"]
        for command, action in (("edge-run", "chat"), ("edge-run", "serve"), ("edge-bench", "run"))
    ]
    assert ("ONNX" in text, "GGUF" in text) == ("onnx" in backends, "llama" in backends)
    assert f"--format {'onnx' if 'onnx' in backends else 'gguf'}" in text
    assert not [word for word in ("PLATFORM", "VERSION", "FORMAT", "SHELL", "SECRET", "KERNELS") if word in text]


def test_a_package_knows_how_another_one_is_made(tmp_path: Path) -> None:
    request = making.PackageRequest(platform="linux-arm64", output=tmp_path, backends=("onnx",), without_kernels=True)
    assert request.command == "edge-export package linux-arm64 -o FOLDER --backend onnx --without-kernels"
    assert request.additions() == {"llama": "--backend llama", "onnx": "", "media": "--with-media", "grammar": "", "serve": ""}
    assert "llama" not in replace(request, platform="linux-x64").additions()  # which has none


def test_one_package_at_a_time_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its folder is a link, as in these tests."""
    cache, downloads, notes, alone = tmp_path / "cache/packages", tmp_path / "downloads", list[str](), list[bool]()
    monkeypatch.setenv("EDGE_MTP_CACHE", str(cache.parent))
    downloads.mkdir()
    cache.parent.mkdir()
    cache.symlink_to(downloads)

    def step(_: str) -> Report:
        with contextlib.suppress(InterruptedError), locked(downloads, refuse):
            alone.append(False)
            raise PackageError("two at a time")
        alone.append(True)
        raise PackageError("far enough")

    def refuse() -> None:
        raise InterruptedError

    with contextlib.ExitStack() as other:
        other.enter_context(locked(downloads))

        def say(line: str) -> None:
            assert alone == []
            notes.append(line)
            other.close()  # the other one's end

        request = making.PackageRequest(platform="linux-arm64", output=tmp_path / "package", backends=("onnx",), without_kernels=True)
        with pytest.raises(PackageError, match="far enough"):
            making.make_package(request, step, say)
    assert notes == [f"Another package is being built with {cache}; waiting for its end."]
    assert alone == [True]


@pytest.mark.parametrize("listed", [{}, {"platform": ["linux-arm64"], "backends": []}, {"name": "web", "files": ["index.js"]}])
def test_force_replaces_packages_only(listed: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web/package.json").write_text(json.dumps(listed))
    request = making.PackageRequest(platform="linux-arm64", output=tmp_path / "web", backends=("onnx",), force=True)
    with pytest.raises(ExportError, match="is not a package, so --force does not replace it"):
        making.make_package(request, lambda _: no_report)


def test_force_replaces_no_package_with_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "lib/__pycache__").mkdir(parents=True)
    (tmp_path / "lib/a.py").write_text("")
    take_inventory(tmp_path, INVENTORY)
    (tmp_path / "lib/__pycache__/a.cpython-311.pyc").write_text("what Python made of it is ours")
    check_output(tmp_path, force=True, kind=making.PACKAGE)
    (tmp_path / "lib/notes.txt").write_text("")
    with pytest.raises(ExportError, match=r"lib/notes\.txt is no file of the package"):
        check_output(tmp_path, force=True, kind=making.PACKAGE)
