"""The Python code of a package: wheels, which pip fetches and checks against the index's hashes, and our packages and commands."""

from __future__ import annotations

import email
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, files, requires, version
from importlib.resources import files as resource_files
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

from edge_devices.children import module_command, run_child
from edge_devices.files.limited_read import sha256_of
from edge_export.device_package.inventory import PYTHON, SITE, Component, Platform, keep_licence, write_file
from edge_export.errors import PackageError

DISTRIBUTION = "edge-mtp"
# Dependencies of our requirements, by extra. pip would also add packages that only their tools use, such as a hub client for tokenizers.
_THEIR_NEEDS = {
    "core": ("markdown-it-py", "mdurl", "pygments", "markupsafe"),
    "serve": ("anyio", "h11", "idna", "typing_extensions"),
    "grammar": (),
    "media": ("cffi", "typing_extensions"),
    "llama": ("diskcache", "typing_extensions"),
    "onnx": (),
}
# Files of wheels that are left out: tests, types, headers, compilers, and tools for building models; onnxruntime's library for C, because
# the Python module contains it; Pillow's fonts, colour profiles and AVIF; lexers of languages that no screen shows; the C parser of YAML,
# because there is one in Python.
_LEFT_OUT = re.compile(
    r"(^|/)tests?/|\.pyi$|\.(h|c|a|pxd|pyx|f90)$|(^|/)__pycache__/"
    r"|^numpy/(f2py|distutils|_pyinstaller|typing/tests)/|^onnxruntime/(transformers|quantization|tools|datasets|backend)/|^[\w.+-]+\.data/"
    r"|^onnxruntime/(capi/libonnxruntime\.so|ThirdPartyNotices)|^numpy/_core/_(simd|\w+_tests)\.|^yaml/_yaml\."
    r"|^PIL/_(avif|imagingcms|imagingft|imagingtk)\.|^pillow\.libs/lib(avif|harfbuzz|freetype|lcms2|brotli\w+|png16)-"
    r"|^pygments/lexers/(?!(__init__|_mapping|python|special)\.py)"
)
_LICENCE_NAME = re.compile(r"(^|/)(licen[cs]e|copying|notice|authors|thirdpartynotices)[^/]*$", re.IGNORECASE)
# Licences of wheels without a licence text.
_WITHOUT_TEXT = {"tokenizers": "Apache-2.0"}
MAX_WHEEL_BYTES = 2 << 30


def add_wheels(folder: Path, platform: Platform, extras: tuple[str, ...], scratch: Path) -> list[Component]:
    """Unpacks the wheels that these extras need into the package. Raises PackageError if one is not available."""
    wheels = scratch / "wheels"
    tags = [word for tag in platform.wheel_tags for word in ("--platform", tag)]
    target = ("--only-binary=:all:", *tags, "--python-version", PYTHON, "--implementation", "cp")
    pip_download(wheels, *target, *wheel_requirements(extras))
    return [_add_wheel(folder, wheel) for wheel in sorted(wheels.glob("*.whl"))]


def wheel_requirements(extras: Sequence[str]) -> list[str]:
    """Returns the requirements that pip fetches for a package with these extras, each once."""
    parts = ("core", *extras)
    needed = dict.fromkeys(line for part in parts for line in (*own_requirements(part), *_THEIR_NEEDS[part]))
    return [line for line in needed if not line.startswith("llama")]  # llama.cpp is built, not fetched


def own_requirements(extra: str) -> list[str]:
    """Returns the requirements of edge-mtp: those that always apply ("core"), or those of an extra."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError as error:
        raise PackageError(f"{DISTRIBUTION} is not installed, so its requirements are not known; pip install it first") from error
    requirements = []
    for requirement in map(Requirement, lines):
        marker, requirement.marker = requirement.marker, None
        always = marker is None or marker.evaluate({"extra": ""})
        included = always if extra == "core" else not always and marker is not None and marker.evaluate({"extra": extra})
        if included:
            requirements.append(str(requirement))
    return requirements


def pip_download(folder: Path, *words: str) -> None:
    """Runs pip download with these words, without dependencies, into a folder. pip checks the index's hashes. Raises PackageError."""
    pip = module_command("pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps", "--dest", str(folder))
    run([*pip, *words], "check the network, and that pip is installed (python -m ensurepip)")


def run(command: Sequence[str | Path], advice: str, each_poll: Callable[[], None] = lambda: None) -> str:
    """Runs a program and returns its standard output.

    `each_poll` is called repeatedly while it runs. Raises PackageError, with the program's last line and `advice`, if it fails.
    """
    done = run_child(command, with_children=True, each_poll=each_poll, failure=PackageError)
    if done.end:
        raise PackageError(f"{_short(command)} failed ({done.reason or done.end}); {advice}")
    return done.output.decode("utf-8", "replace")


def _short(command: Sequence[str | Path]) -> str:
    """Returns the program and its first two words that are neither options nor paths, which identify the step."""
    words = [str(word) for word in command[1:] if not str(word).startswith("-") and "/" not in str(word)]
    return " ".join([Path(command[0]).name, *words[:2]])


def _add_wheel(folder: Path, wheel: Path) -> Component:
    site = folder / SITE
    with zipfile.ZipFile(wheel) as archive:
        about = email.message_from_bytes(archive.read(_metadata_name(archive)))
        name, version = str(about["Name"]).lower(), str(about["Version"])
        texts = []
        for member in _members(archive, wheel):
            if _LICENCE_NAME.search(member) and not member.endswith(".py"):
                texts.append(keep_licence(folder, f"{name}/{PurePosixPath(member).name}", archive.read(member)))
            if _LEFT_OUT.search(member) or member.endswith(".dist-info/RECORD"):
                continue  # RECORD is left out too, because it would list files that are not there
            path = site / member
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, path.open("wb") as destination:
                shutil.copyfileobj(source, destination)
    if not texts and name in _WITHOUT_TEXT:
        texts = [keep_licence(folder, f"{name}/LICENSE", own_licence())]
    return Component(
        name=name,
        version=version,
        source=f"PyPI, {wheel.name}",
        licence=_licence(about) or _WITHOUT_TEXT.get(name, "see its text"),
        texts=tuple(dict.fromkeys(texts)),
        sha256=sha256_of(wheel),
    )


def _members(archive: zipfile.ZipFile, wheel: Path) -> Iterator[str]:
    """Yields the files of a wheel. Raises PackageError if a path leads out of its folder, or if the wheel is too large."""
    if sum(info.file_size for info in archive.infolist()) > MAX_WHEEL_BYTES:
        raise PackageError(f"{wheel.name} unpacks to more than {MAX_WHEEL_BYTES} bytes; check the package index")
    for info in archive.infolist():
        path = PurePosixPath(info.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in info.filename:
            raise PackageError(f"{wheel.name} holds {info.filename!r}, which is outside the package; check the package index")
        if not info.is_dir():
            yield info.filename


def _metadata_name(archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith(".dist-info/METADATA")]
    if not names:
        raise PackageError(f"{Path(str(archive.filename)).name} is not a wheel: it has no METADATA; check the package index")
    return names[0]


def _licence(about: email.message.Message) -> str:
    """Returns the licence in the wheel's metadata: an expression, else classifiers, else a text of one line."""
    if about["License-Expression"]:
        return str(about["License-Expression"])
    classified = [str(line).rsplit(" :: ", 1)[-1] for line in about.get_all("Classifier") or [] if str(line).startswith("License ::")]
    licence = str(about["License"] or "")
    return ", ".join(classified) or (licence if "\n" not in licence else "")


def own_licence() -> bytes:
    """Returns the text of this program's licence, Apache-2.0."""
    for file in files(DISTRIBUTION) or []:
        if file.name == "LICENSE":
            return Path(str(file.locate())).read_bytes()
    raise PackageError(f"the licence of {DISTRIBUTION} is not installed; install it again")


# A device needs only the measuring part of the benchmark, because reports are made on the computer that collects its records.
_LIGHT = ("edge_bench/measure", "edge_runtime", "edge_devices")
# The row kernels are added by native_libraries.py. Their sources are not needed on a device.
_NOT_OURS = shutil.ignore_patterns("__pycache__", "*.pyc", "libedge_rows*", "*.cpp", "*.h")
# This part of the scripts finds the package's folder from the script's own path, following symbolic links, so that it may be anywhere.
_HERE = """\
self=$0
[ -L "$self" ] && self=$(readlink -f -- "$self")
case $self in */*) here=${self%/*}/.. ;; *) here=.. ;; esac
here=$(CDPATH= cd -- "$here" && pwd -P) || exit 127
"""
_PYTHON = """\
#!SHELL
# The Python of this folder, run by its own loader on its own libraries; what the system has of either is not used.
HERECHOICE# Libraries and settings of another Python would be loaded into this one. Nothing of this is exported to programs that it starts.
unset LD_LIBRARY_PATH LD_PRELOAD LD_AUDIT PYTHONHOME PYTHONPATH PYTHONSTARTUP BLIS_ARCH_TYPE
# onnxruntime reports to its makers unless it is told not to before it is loaded.
export ORT_DISABLE_TELEMETRY=1
HOMES# To its children, too, Python is this script: without its loader it would not start.
exec "$here/lib/LOADER" --inhibit-cache --library-path "LIBRARIES$here/lib" \\
    --argv0 "$here/bin/edge-python" "$here/bin/pythonVERSION" -s "$@"
"""
# A phone's shell user has no writable home and no /tmp.
_ANDROID_HOMES = """\
if [ -z "$HOME" ] || [ ! -w "$HOME" ]; then export HOME="$here/home"; mkdir -p "$HOME"; fi
if [ -z "$TMPDIR" ] || [ ! -w "$TMPDIR" ]; then export TMPDIR="$here/tmp"; mkdir -p "$TMPDIR"; fi
"""
# The commands, and the names of their entry points.
_COMMANDS = {"edge-run": "edge_run", "edge-bench": "edge_bench_on_device", "edge-devices": "edge_devices"}
_COMMAND = """\
#!SHELL
HEREexec "SHELL" "$here/bin/edge-python" -P -c 'from edge_devices.entry_points import FUNCTION; FUNCTION()' "$@"
"""


def write_launchers(folder: Path, platform: Platform, backends: Sequence[str]) -> None:
    """Writes bin/edge-python and the commands that use it."""
    llama = "llama" in backends
    texts = {"edge-python": _PYTHON}
    for name, function in _COMMANDS.items():
        texts[name] = _COMMAND.replace("FUNCTION", function)
    for name, text in texts.items():
        text = (
            text.replace("HOMES", _ANDROID_HOMES if platform.name.startswith("android") else "")
            .replace("CHOICE", _choice(platform) if llama else "")
            .replace("HERE", _HERE)
            .replace("SHELL", platform.shell)
            .replace("LOADER", platform.loader)
            .replace("LIBRARIES", f"$here/lib/llama-$cpu:$here/{SITE}/llama_cpp/lib:" if llama else "")
            .replace("VERSION", PYTHON)
        )
        write_file(folder / "bin" / name, text.encode(), executable=True)


def _choice(platform: Platform) -> str:
    """Returns shell code that sets $cpu to the newest build of llama.cpp's CPU library that the processor's features allow."""
    lines = [
        "flags=",
        f'while read -r key _ rest; do case $key in {platform.cpuinfo_key}) flags=" $rest "; break ;; esac; done </proc/cpuinfo',
        'has() { for flag do case $flags in *" $flag "*) ;; *) return 1 ;; esac; done; }',
    ]
    for place, processors in enumerate(platform.processors):
        if processors.features:
            lines.append(f"{'elif' if place else 'if'} has {' '.join(processors.features)}; then cpu={processors.name}")
        else:
            lines.append(f"else cpu={processors.name}; fi")
    return "\n".join(lines) + "\n"


def add_own_code(folder: Path, extras: Sequence[str]) -> Component:
    """Copies the code that a device runs, without the exporter. `extras` are those whose libraries are included. Raises PackageError."""
    copy_packages(folder / SITE)
    installed = version(DISTRIBUTION)
    about = folder / SITE / f"{DISTRIBUTION.replace('-', '_')}-{installed}.dist-info"
    # Commands read the version from the distribution's metadata, and the doctor reads the requirements. The rest of it is about the
    # exporter.
    lines = [f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {installed}\n"]
    for extra in extras:
        lines.append(f"Provides-Extra: {extra}\n")
        lines += [f'Requires-Dist: {requirement}; extra == "{extra}"\n' for requirement in own_requirements(extra)]
    write_file(about / "METADATA", "".join(lines).encode())
    text = keep_licence(folder, f"{DISTRIBUTION}/LICENSE", own_licence())
    return Component(name=DISTRIBUTION, version=installed, source="this program", licence="Apache-2.0", texts=(text,))


def copy_packages(folder: Path) -> None:
    """Copies the Python packages of this program that a device imports."""
    for path in _LIGHT:
        shutil.copytree(str(resource_files(path.replace("/", "."))), folder / path, ignore=_NOT_OURS)
