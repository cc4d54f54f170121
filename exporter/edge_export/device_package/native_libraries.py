"""The native code of a package: llama.cpp, cross-compiled by zig's C compiler, and edge-mtp's row kernels. Builds are cached."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from edge_devices.errors import errors_as
from edge_devices.files.limited_read import sha256_of
from edge_devices.machine.processors import usable_processors
from edge_devices.waiting import Report
from edge_export.device_package.inventory import SITE, Component, Platform, Processors, copy_file, keep_licence, write_file
from edge_export.device_package.wheels import own_requirements, pip_download, run
from edge_export.errors import PackageError
from edge_runtime.backends.kernels.build import LIBRARIES, TARGETS, build, library_name, variants

# A function that begins a step with a title, and returns a function to report the step's progress.
Step = Callable[[str], Report]
# The only version whose MTP interface the runtime supports (see the extra [llama]).
VERSION = "0.3.36"
TOOLS = ("llama-speculative-simple", "llama-bench")
# The oldest C library with which the compiled libraries run. The package's own, 2.36, is newer.
_GLIBC = "2.28"
_ADVICE = "look for room on the disk, or leave llama.cpp out with --backend onnx"
_NEED_TOOLS = "pip install 'edge-mtp[package]'"
_SWITCHES = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DGGML_NATIVE=OFF",
    "-DGGML_OPENMP=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    # Versions in library names would need symbolic links, which are lost when files are copied to a phone.
    "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON",
    "-DCMAKE_SKIP_RPATH=ON",
)
_UNITY = Path(__file__).with_name("unity.cmake")
_LIBRARIES = ("libllama.so", "libggml.so", "libggml-base.so", "libmtmd.so")
_CPU_LIBRARY = "libggml-cpu.so"
_LEFT_OUT = re.compile(r"/(tests|server|docs)/|\.pyi$")


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """zig, cmake and ninja, the folder of cached builds, and llama-cpp-python's sources."""

    zig: Path
    cmake: str
    ninja: str
    home: Path
    sources: Path

    @property
    def llama_cpp(self) -> Path:
        """The folder of llama.cpp's own sources."""
        return self.sources / "vendor/llama.cpp"


def open_toolchain(cache: Path) -> Toolchain:
    """Finds the compilers, and fetches the source archive once. Raises PackageError with the name of a missing tool."""
    spec = find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise PackageError(f"ziglang, which compiles llama.cpp for the device, is missing; {_NEED_TOOLS}")
    cmake, ninja = _program_path("cmake"), _program_path("ninja")
    zig = Path(spec.submodule_search_locations[0]) / "zig"
    home = cache / f"llama-cpp-python-{VERSION}-zig-{_zig_version()}"
    home.mkdir(parents=True, exist_ok=True)
    return Toolchain(zig=zig, cmake=cmake, ninja=ninja, home=home, sources=_sources(home))


def _program_path(program: str) -> str:
    """Returns the path of a build tool. Raises PackageError if it is not installed."""
    # pip installs programs beside Python, and that folder need not be in PATH.
    path = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
    if path is None:
        raise PackageError(f"{program}, which building the package needs, is missing; {_NEED_TOOLS}")
    return path


def add_llama(folder: Path, platform: Platform, toolchain: Toolchain, step: Step) -> Component:
    """Adds llama_cpp with its libraries to the package, and a CPU library for each kind of processor."""
    llama = folder / SITE / "llama_cpp"
    for path in sorted((toolchain.sources / "llama_cpp").rglob("*.py")):
        relative = path.relative_to(toolchain.sources / "llama_cpp")
        if not _LEFT_OUT.search(f"/{relative.as_posix()}"):
            copy_file(path, llama / relative)
    for processors in platform.processors:
        report = step(f"llama.cpp for {platform.machine} {processors.name} (minutes the first time, then kept)")
        all_libraries = processors is platform.processors[-1]
        targets = ("llama", "mtmd") if all_libraries else ("ggml-cpu",)
        built = _built(toolchain, platform, processors, report, static=False, targets=targets)
        copy_file(built / "bin" / _CPU_LIBRARY, folder / f"lib/llama-{processors.name}" / _CPU_LIBRARY)
        for name in _LIBRARIES if all_libraries else ():
            copy_file(built / "bin" / name, llama / "lib" / name)
    about = f"Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: {VERSION}\n"
    write_file(folder / SITE / f"llama_cpp_python-{VERSION}.dist-info/METADATA", about.encode())
    return _component(folder, toolchain, "llama-cpp-python")


def add_tools(folder: Path, platform: Platform, toolchain: Toolchain, step: Step) -> list[Component]:
    """Adds llama.cpp's own tools to tools/, as static programs, which run without Python."""
    processors = next(kind for kind in platform.processors if kind.name == platform.tools)
    report = step(f"llama.cpp's tools for {platform.machine} {processors.name}, static (minutes the first time, then kept)")
    built = _built(toolchain, platform, processors, report, static=True, targets=TOOLS)
    for name in TOOLS:
        copy_file(built / "bin" / name, folder / "tools" / name, executable=True)
    musl = toolchain.zig.parent / "lib/libc/musl/COPYRIGHT"
    texts = (keep_licence(folder, "musl/COPYRIGHT", musl.read_bytes()),) if musl.is_file() else ()
    libc = Component(name="musl", version=f"of zig {_zig_version()}", source="PyPI, ziglang", licence="MIT", texts=texts)
    return [_component(folder, toolchain, "llama.cpp tools"), libc]


def _built(
    toolchain: Toolchain, platform: Platform, processors: Processors, report: Report, *, static: bool, targets: tuple[str, ...]
) -> Path:
    """Builds these targets, unless they were built before, and returns the build's folder. An interrupted build is continued."""
    kind = "static" if static else "shared"
    build = toolchain.home / f"{platform.machine}-{processors.name}-{kind}"
    triple = f"{platform.machine}-linux-{'musl' if static else f'gnu.{_GLIBC}'}"
    flags = f"-target {triple} -mcpu={processors.model}"
    kinds = (
        ("-DBUILD_SHARED_LIBS=OFF", "-DGGML_STATIC=ON", "-DCMAKE_EXE_LINKER_FLAGS=-static -s")
        if static
        else (
            "-DBUILD_SHARED_LIBS=ON",
            "-DLLAMA_BUILD_COMMON=OFF",
            "-DLLAMA_BUILD_TOOLS=OFF",
            "-DLLAMA_BUILD_EXAMPLES=OFF",
            # The encoder of images and sound. Its own file decoders, such as ffmpeg, are not used.
            "-DLLAMA_BUILD_MTMD=ON",
            "-DMTMD_VIDEO=OFF",
            # zig compiles the C++ library that it links, which takes a minute. With these flags it is the same for all processors.
            "-DCMAKE_SHARED_LINKER_FLAGS=-s -mcpu=generic",
        )
    )
    switches = (*_SWITCHES, *kinds, f"-DCMAKE_SYSTEM_PROCESSOR={platform.machine}")
    recipe, done = "\n".join((flags, *switches, _UNITY.read_text(encoding="utf-8"), *targets)), build / ".built"
    if done.is_file() and done.read_text() == recipe:
        return build
    ninja = f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja}"
    places = (toolchain.cmake, "-S", toolchain.llama_cpp, "-B", build, "-G", "Ninja", ninja)
    run([*places, *switches, f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={_UNITY}", *_wrappers(toolchain, build, flags)], _ADVICE)
    _run_ninja(toolchain, build, targets, report)
    done.write_text(recipe)
    return build


def _run_ninja(toolchain: Toolchain, build: Path, targets: tuple[str, ...], report: Report) -> None:
    """Compiles the targets. The progress is found from ninja's log, which gets a line for each file."""
    command: list[str | Path] = [toolchain.cmake, "--build", build, "--parallel", str(usable_processors()), "--target", *targets]
    left, log = run([*command, "--", "-n"], _ADVICE).count("\n["), build / ".ninja_log"

    def lines() -> int:
        return log.read_bytes().count(b"\n") if log.is_file() else 0

    before = lines()
    run(command, _ADVICE, each_poll=lambda: report(min(1.0, (lines() - before) / max(left, 1))))


def _wrappers(toolchain: Toolchain, build: Path, flags: str) -> Iterator[str]:
    """Writes scripts that serve as cmake's compilers and binary tools, and yields the switches that name them."""
    build.mkdir(parents=True, exist_ok=True)
    named = {"cc": ("C_COMPILER", flags), "c++": ("CXX_COMPILER", flags), "ar": ("AR", ""), "ranlib": ("RANLIB", "")}
    for program, (variable, options) in named.items():
        path = build / f"zig-{program}"
        path.write_text(f"#!/bin/sh\nexec '{toolchain.zig}' {program} {options} \"$@\"\n")
        path.chmod(0o755)
        yield f"-DCMAKE_{variable}={path}"


def _sources(home: Path) -> Path:
    """Returns the folder of the unpacked source archive. If needed, pip fetches it and checks it against the index's hash."""
    sources = home / f"llama_cpp_python-{VERSION}"
    if (sources / "vendor/llama.cpp/CMakeLists.txt").is_file():
        return sources
    pip_download(home, "--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}")
    partial = home / "unpacking"
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(home / f"{sources.name}.tar.gz") as archive:
        # Python before 3.11.4, such as Debian 12's, has no filters. The archive can be trusted, because pip checked its hash.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        archive.extractall(partial)
    (partial / sources.name).rename(sources)
    partial.rmdir()
    return sources


def _zig_version() -> str:
    try:
        return version("ziglang")
    except PackageNotFoundError as error:
        raise PackageError(f"ziglang, which compiles llama.cpp for the device, is missing; {_NEED_TOOLS}") from error


def _component(folder: Path, toolchain: Toolchain, name: str) -> Component:
    texts = [keep_licence(folder, f"{name}/LICENSE.md", (toolchain.sources / "LICENSE.md").read_bytes())]
    for path in sorted([toolchain.llama_cpp / "LICENSE", *(toolchain.llama_cpp / "licenses").glob("LICENSE*")]):
        texts.append(keep_licence(folder, f"{name}/llama.cpp/{path.name}", path.read_bytes()))
    return Component(
        name=name,
        version=VERSION,
        source=f"PyPI, {toolchain.sources.name}.tar.gz, compiled by zig {_zig_version()}",
        licence="MIT",
        texts=tuple(texts),
        sha256=sha256_of(toolchain.home / f"{toolchain.sources.name}.tar.gz"),
    )


IN_PACKAGE = f"{SITE}/edge_runtime/backends/kernels/lib"


def check_kernels(platform: Platform) -> None:
    """Raises PackageError if this installation neither has the platform's kernels nor can compile them."""
    if not _shipped(platform).is_file() and find_spec("ziglang") is None:
        zig = next((line for line in own_requirements("package") if line.startswith("ziglang")), "ziglang")
        raise PackageError(
            f"this installation has no row kernels for {platform.name}, and ziglang, which compiles them, is missing; pip install '{zig}', "
            "or give --without-kernels, with which standard operators run, which are slower"
        )


def add_kernels(folder: Path, platform: Platform, cache: Path, step: Step) -> tuple[str, ...]:
    """Adds the platform's library of row kernels to the package, and returns the kernels' variants. Raises PackageError.

    The library is the one in a released wheel of edge-mtp, or else is compiled here by zig, which is installed as a wheel. `cache` keeps
    compiled files.
    """
    check_kernels(platform)
    shipped, target = _shipped(platform), TARGETS["Linux", platform.machine]
    if shipped.is_file():
        copy_file(shipped, folder / IN_PACKAGE / shipped.name)
    else:
        report = step(f"row kernels for {platform.machine} (minutes the first time, then kept)")
        with errors_as(PackageError, f"the row kernels cannot be built for {platform.name}", "report this error", RuntimeError, OSError):
            build(target, folder / IN_PACKAGE, cache=cache / "zig", report=report)
    return variants(target)


def _shipped(platform: Platform) -> Path:
    """Returns the path at which a wheel has the platform's library. For this machine's platform, it is the library that runs here."""
    return LIBRARIES / library_name(TARGETS["Linux", platform.machine])
