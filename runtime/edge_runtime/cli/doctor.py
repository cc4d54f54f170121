"""`edge-run doctor`, which shows what works on this machine, and `edge-run tune`, which measures what sessions would otherwise learn."""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from packaging.requirements import Requirement

from edge_devices.command_line import PanelCommand
from edge_devices.errors import byte_text
from edge_devices.files.user_cache import CACHE_VARIABLE, NOT_OURS, cache_folder, only_ours, read_entries
from edge_devices.machine.detection import Device, detect_device
from edge_devices.machine.device_package import DevicePackage, this_package
from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, MeterState
from edge_devices.meters.search import find_meters
from edge_runtime.backends.kernels import packed_cache
from edge_runtime.backends.selection import BACKENDS, CARDS, BackendKind, BackendRates, ask_backend, cached_choices, load_backend
from edge_runtime.calibration.measured import cache_file
from edge_runtime.cli.options import BundlePath, Opening, opens_bundle
from edge_runtime.drafting.cost_model import Costs
from edge_runtime.errors import BackendError
from edge_runtime.session.session import Session

if TYPE_CHECKING:
    from rich.table import Table


EXAMPLES = """
\b
Examples:
  edge-run tune my-bundle                    the faster backend, its threads and costs
  edge-run tune my-bundle --backend onnx     of one backend
"""
_ROWS, _STEPS = (1, 2, 4, 8), 3


@click.command(cls=PanelCommand, epilog=EXAMPLES)
@click.argument("bundle", type=BundlePath())
@opens_bundle()
def tune(bundle: Path, opening: Opening) -> None:
    """Measure the faster backend, its threads and what drafts cost, for later starts.

    It takes seconds. Without it a session estimates these costs from the bundle's sizes and corrects them while it runs. Run it on a
    quiet machine: what a busy one gives is measured again later. What a quiet machine measured is kept.
    """
    with opening.session(bundle, warn=False, measure=True) as session:
        for line in tuned_lines(session, session.costs()):
            click.echo(line)


def tuned_lines(session: Session, costs: Costs) -> list[str]:
    """Returns what was measured: the backend, and the time (or the energy, if that is minimized) of verifies and of a draft."""
    unit = "mJ" if session.settings.objective == "energy" else "ms"
    verifies = ", ".join(f"{rows}: {1000 * costs.verify(rows):.3g}" for rows in _ROWS if rows <= session.settings.longest_draft + 1)
    title = CARDS[session.backend].title if session.backend in CARDS else session.backend
    return [
        f"{title}, drafter {session.drafter_kind}{', provisional' if costs.is_provisional else ''}",
        f"step by its tokens, {unit}: {verifies}",
        f"draft of {_STEPS}, {unit}: {1000 * costs.draft(_STEPS):.3g}",
        f"kept in {cache_file()}",
    ]


DISTRIBUTION = "edge-mtp"
# The extras for users and their purposes; the other extras are for developers of edge-mtp.
EXTRAS = {
    **{kind: f"runs {card.format.upper()} bundles" for kind, card in CARDS.items()},
    "openvino": "Intel's processors, GPUs and NPUs",
    "qnn": "Qualcomm's NPUs",
    "grammar": "JSON schemas, grammars, regular expressions",
    "serve": "edge-run serve",
    "media": "images and sound",
    "export-onnx": "edge-export to ONNX graphs",
    "export": "edge-export to GGUF files",
    "package": "packages for devices, with llama.cpp too",
    "sign": "signed bundles",
    "fleet": "edge-bench devices --fleet",
    "verify": "parity check of an export",
    "optimum": "optimum-cli export edge",
    "report": "plots of edge-bench run --html",
}
# Extras that only machines with a certain device need. The doctor does not propose them.
_OF_DEVICES = {"openvino", "qnn"}
_COMPILED_BY = {"cmake": ("cmake",), "a C++ compiler": ("c++", "g++", "clang++")}


@dataclass(frozen=True, kw_only=True)
class Extra:
    """An extra of the package, with the versions of its installed requirements and its missing requirements."""

    name: str
    purpose: str
    installed: dict[str, str]
    missing: tuple[str, ...]

    @property
    def is_required(self) -> bool:
        """Whether the extra has requirements on this machine."""
        return bool(self.installed or self.missing)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The findings.

    `backends` has the results of `ask_backend`; None if the library is not installed. `build_tools` has the path of each tool, or None.
    `choices` says which backend is faster for bundles with both formats. `cache_files` has path, bytes and entries of each file;
    `cache_refused` has the files that are not used. `packed_files` and `packed_bytes` are the number and size of files with packed weights.
    `package` is the device package in which this runs, if any; its files in `package_faults` are missing or changed.
    """

    version: str
    python: str
    executable: str
    device: Device
    backends: Mapping[BackendKind, dict[str, Any] | None]
    build_tools: Mapping[str, str | None]
    extras: tuple[Extra, ...]
    choices: tuple[BackendRates, ...]
    meters: tuple[Finding, ...]
    cache: str
    cache_variable: str
    cache_files: tuple[dict[str, Any], ...]
    cache_refused: tuple[str, ...]
    packed_files: int
    packed_bytes: int
    package: DevicePackage | None = None
    package_faults: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether some backend can run bundles."""
        return any(answer is not None and "error" not in answer for answer in self.backends.values())

    @property
    def install(self) -> str | None:
        """The command that installs incomplete extras, except those of devices; None if none is incomplete, or in a device package."""
        if self.package is not None:
            return None
        missing = [extra.name for extra in self.extras if extra.missing and extra.name not in _OF_DEVICES]
        if "export" in missing and "export-onnx" in missing:
            missing.remove("export-onnx")  # it is a part of export
        return f"{shlex.quote(self.executable)} -m pip install '{DISTRIBUTION}[{','.join(missing)}]'" if missing else None

    def to_json(self) -> dict[str, Any]:
        return {
            "ready": self.ready,
            "version": self.version,
            "python": self.python,
            "executable": self.executable,
            "machine": self.device.to_json(),
            "backends": dict(self.backends),
            "build_tools": dict(self.build_tools),
            "extras": [asdict(extra) for extra in self.extras],
            "faster_backends": [asdict(choice) for choice in self.choices],
            "meters": [finding.to_json() for finding in self.meters],
            "cache": {
                "folder": self.cache,
                "variable": self.cache_variable,
                "files": list(self.cache_files),
                "refused": list(self.cache_refused),
            },
            "packed_cache": {"folder": str(Path(self.cache) / packed_cache.FOLDER), "files": self.packed_files, "bytes": self.packed_bytes},
            "install": self.install,
            "package": None
            if self.package is None
            else {
                "platform": self.package.platform,
                "backends": list(self.package.backends),
                "row_kernels": list(self.package.row_kernels),
                "faults": list(self.package_faults),
            },
        }


def diagnose(system: System, ask: Callable[[BackendKind], dict[str, Any]] = ask_backend) -> Diagnosis:
    """Examines Python, packages, backends (in child processes), meters, machine and caches. Changes nothing. Raises BackendError."""
    try:
        version, requirements = metadata.version(DISTRIBUTION), metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        remedy = "run: pip install . in its checkout" if this_package() is None else "copy the device package again"
        raise BackendError(f"{DISTRIBUTION} is not installed for {sys.executable}; {remedy}") from None
    folder, file, package = cache_folder(), cache_file(), this_package()
    packed = [size for _, size, _ in packed_cache.packed_files(packed_cache.default_folder())]
    return Diagnosis(
        version=version,
        python=platform.python_version(),
        executable=sys.executable,
        device=detect_device(system),
        backends={kind: ask(kind) if find_spec(card.library) is not None else None for kind, card in CARDS.items()},
        build_tools={tool: next((path for name in names if (path := shutil.which(name))), None) for tool, names in _COMPILED_BY.items()},
        # Extras without requirements on this machine are left out; there is nothing to report about them.
        extras=tuple(extra for name, purpose in EXTRAS.items() if (extra := _extra(name, purpose, requirements)).is_required),
        choices=tuple(cached_choices()),
        meters=tuple(find_meters(system)),
        cache=str(folder),
        cache_variable=CACHE_VARIABLE,
        cache_files=({"path": str(file), "bytes": file.stat().st_size, "entries": len(read_entries(file))},) if file.is_file() else (),
        cache_refused=tuple(path.name for path in sorted(folder.glob("*.json")) if path.is_file() and not only_ours(path.stat())),
        packed_files=len(packed),
        packed_bytes=sum(packed),
        package=package,
        package_faults=() if package is None else tuple(package.changed()),
    )


def _extra(name: str, purpose: str, requirements: list[str]) -> Extra:
    installed: dict[str, str] = {}
    missing = []
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is None or not requirement.marker.evaluate({"extra": name}):
            continue
        try:
            installed[requirement.name] = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(line.partition(";")[0].strip())
    return Extra(name=name, purpose=purpose, installed=installed, missing=tuple(missing))


Row = tuple[str, str, str]
_COLOURS = {"ok": "green", "missing": "yellow", "broken": "red", "denied": "yellow"}


@click.command(cls=PanelCommand)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show what works on this machine and what is missing."""
    show_diagnosis(diagnose(System()), as_json=as_json)


def show_diagnosis(diagnosis: Diagnosis, *, as_json: bool) -> None:
    """Prints the diagnosis on standard output."""
    if as_json:
        click.echo(json.dumps(diagnosis.to_json()))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(verdict(diagnosis), soft_wrap=True, markup=False)
    console.print(diagnosis_table(diagnosis))
    if diagnosis.install:
        # Not wrapped, so that it can be copied.
        console.print(
            f"to install what is missing (leave out the extras that you do not need):\n{diagnosis.install}", soft_wrap=True, markup=False
        )


def verdict(diagnosis: Diagnosis) -> str:
    """Returns in one sentence whether bundles can run here, and what is broken."""
    if not diagnosis.ready:
        return f"No bundle can run here yet: a backend ({' or '.join(BACKENDS)}) is missing."
    broken = [what for what, state, _ in rows(diagnosis) if state == "broken"]
    return "Bundles can run here" + (f", but this is broken: {', '.join(broken)}." if broken else ".")


def diagnosis_table(diagnosis: Diagnosis) -> Table:
    """Returns a table of subject, state and finding."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for what, state, finding in rows(diagnosis):
        table.add_row(what, Text(state, style=_COLOURS.get(state, "")), Text(finding))
    return table


def rows(diagnosis: Diagnosis) -> Iterator[Row]:
    """Yields subject, state (ok, missing, broken, denied, or empty for plain information) and finding."""
    device = diagnosis.device
    machine = device.machine
    memory = f", {byte_text(machine.memory_available)} available" if machine.memory_available is not None else ""
    yield "edge-mtp", "ok", f"{diagnosis.version}, Python {diagnosis.python}, {diagnosis.executable}"
    yield (
        "machine",
        "",
        f"{machine.system} {machine.architecture}, {machine.processor or 'unknown processor'}, "
        f"{machine.usable_processors} processors{memory}",
    )
    yield "profile", "", f"{device.profile.name}: {device.profile.quantization}, {device.threads} threads ({device.why})"
    yield from _package_rows(diagnosis)
    yield from _backend_rows(diagnosis)
    for choice in diagnosis.choices:
        yield "faster backend", "ok", f"{choice.bundle}: {choice.sentence()}, as measured"
    for extra in diagnosis.extras:
        if extra.name not in diagnosis.backends:
            versions = ", ".join(f"{name} {version}" for name, version in extra.installed.items())
            lacking = f"missing: {', '.join(extra.missing)}" if extra.missing else ""
            yield extra.name, "missing" if extra.missing else "ok", f"{extra.purpose}: {'; '.join(filter(None, (versions, lacking)))}"
    yield from _meter_rows(diagnosis)
    yield from _cache_rows(diagnosis)


def _package_rows(diagnosis: Diagnosis) -> Iterator[Row]:
    """Yields what a device package contains, and what could be added to it."""
    package, faults = diagnosis.package, diagnosis.package_faults
    if package is None:
        return
    if faults:
        named = ", ".join(faults[:3]) + (", ..." if len(faults) > 3 else "")
        yield (
            "device package",
            "broken",
            f"{package.platform}: missing or changed files: {len(faults)} ({named}); copy the package again",
        )
    else:
        yield "device package", "ok", f"{package.platform}: all {len(package.files)} files are there and unchanged"
    if left_out := [f"{EXTRAS[extra]} ({option})" for extra, option in package.additions.items() if option and extra in EXTRAS]:
        yield "", "", f"made without: {', '.join(left_out)}; {package.command} with such an option makes another one"


def _backend_rows(diagnosis: Diagnosis) -> Iterator[Row]:
    for kind, description in diagnosis.backends.items():
        card = CARDS[kind]
        if description is None and diagnosis.package is not None:
            if kind in diagnosis.package.backends:
                yield card.title, "missing", f"runs {card.format.upper()} bundles: it should be in this device package; copy it again"
        elif description is None:
            lacking = [tool for tool, path in diagnosis.build_tools.items() if path is None] if card.compiled else []
            needs = f"which needs {' and '.join(lacking)} first (Debian: apt install cmake g++)"
            tools = f"; installing it compiles {card.title}, {needs}" if lacking else ""
            yield card.title, "missing", f"runs {card.format.upper()} bundles: {card.package} is not installed{tools}"
        elif "error" in description:
            versions = next((extra.installed for extra in diagnosis.extras if extra.name == kind), {})
            installed = versions.get(card.package) if "died of" in description["error"] else None
            remedy = load_backend(kind).remedy(installed) if installed else None
            yield card.title, "broken", f"{description['error']}{f'; {remedy}' if remedy else ''}"
        else:
            yield from load_backend(kind).findings(description)


def _meter_rows(diagnosis: Diagnosis) -> Iterator[Row]:
    shown = False
    for finding in diagnosis.meters:
        if finding.meter is not None:
            facts = finding.meter.facts
            yield "energy meter", "ok", f"{facts.name}: {facts.kind}, scope {facts.scope}"
        elif finding.state is MeterState.PRESENT:
            yield "energy meter", "denied", f"{finding.name}: {finding.reason}" + (f"; {finding.remedy}" if finding.remedy else "")
        shown = shown or finding.state is not MeterState.ABSENT
    if not shown:
        yield "energy meter", "", f"none of {len(diagnosis.meters)} kinds found (see edge-devices meters); only energy figures need one"


def _cache_rows(diagnosis: Diagnosis) -> Iterator[Row]:
    files = [f"{Path(file['path']).name}: {file['entries']} entries ({byte_text(file['bytes'])})" for file in diagnosis.cache_files]
    if diagnosis.packed_files:
        files.append(f"packed weights in {packed_cache.FOLDER}: {diagnosis.packed_files} files ({byte_text(diagnosis.packed_bytes)})")
    yield "cache", "", f"{diagnosis.cache} (${diagnosis.cache_variable}): {'; '.join(files) or 'empty'}"
    for name in diagnosis.cache_refused:
        yield "cache", "denied", f"{name}: {NOT_OURS}; remove it, or set {diagnosis.cache_variable} to a folder that only you can write"
