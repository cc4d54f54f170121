"""Results of runs on several machines: reads and checks their raw records, and makes tables that compare them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from edge_bench.measure.energy import awaits_table, energy_figures
from edge_bench.measure.records import PLAIN, Records, read_records
from edge_bench.report.figures import Figures, Row, figures
from edge_bench.report.tables import (
    COMPARED,
    NONE,
    PROMPT_JOULES,
    PROMPTS,
    Columns,
    TextTable,
    comparison_cells,
    joules,
    megabytes,
    ratio_text,
    scope_tables,
    share,
    table_of,
)
from edge_devices.energy.report import EnergyReport
from edge_devices.energy.run_log import RunLog, is_energy_log, read_log
from edge_devices.errors import EdgeError, errors_as
from edge_devices.files.atomic_write import write_text
from edge_devices.files.limited_read import read_at_most
from edge_devices.files.typed_json import from_json, to_json
from edge_runtime.errors import RequestError

# Each device has a folder with its raw records and device.json. Speeds share one table; joules are compared only within one meter scope.

SCHEMA = 1
RUNS, ENERGY, WATCH, LOG, DEVICE = "runs.jsonl", "energy.jsonl", "watch.jsonl", "log", "device.json"
MAX_DESCRIPTION_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DeviceDescription:
    """What device.json holds. `warnings` are from before the run, `happenings` from during it; `charge_used` is in percent.

    `failed` says that the benchmark ended with an error, which is the last of the happenings.
    """

    schema: int = SCHEMA
    device: str = ""
    model: str = ""
    warnings: tuple[str, ...] = ()
    happenings: tuple[str, ...] = ()
    hottest_c: float | None = None
    charge_used: int | None = None
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class DeviceResult(DeviceDescription):
    """One run on one device. `remarks` says why there are no joules although they were measured."""

    run: str
    figures: Figures
    remarks: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name of the device, with its model, in tables."""
        return f"{self.device} ({self.model})" if self.model else self.device

    def to_json(self) -> dict[str, Any]:
        return {field.name: to_json(getattr(self, field.name)) for field in fields(DeviceDescription)} | {
            "run": self.run,
            "figures": self.figures.to_json(),
        }


def note_device(folder: Path, *, device: str, model: str, warnings: Sequence[str]) -> None:
    """Writes device.json before the run. Raises RequestError if the folder cannot be written."""
    _write(folder, DeviceDescription(device=device, model=model, warnings=tuple(warnings)))


def complete_result(
    folder: Path, *, device: str, incidents: Sequence[str], hottest_c: float | None, charge_used: int | None, failed: bool
) -> DeviceResult:
    """Adds the run's incidents to device.json. Returns the result in `folder`."""
    noted = _description(folder / DEVICE)
    known = replace(noted, device=device, happenings=tuple(incidents), hottest_c=hottest_c, charge_used=charge_used, failed=failed)
    _write(folder, known)
    return read_result(folder)


def _write(folder: Path, description: DeviceDescription) -> None:
    with errors_as(RequestError, f"{folder} cannot be created", "choose another folder with --results"):
        folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / DEVICE, [json.dumps(to_json(description), ensure_ascii=False, indent=1), "\n"])


def read_result(folder: Path) -> DeviceResult:
    """Reads a device's folder; without device.json it is a run of this machine. Raises RequestError for an unusable folder.

    If the joules cannot be used, the result has the speeds and a note with the reason.
    """
    for path in (folder / RUNS, folder / ENERGY, folder / DEVICE):
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise RequestError(f"{path} is not a regular file; give the --results folder of earlier runs")
    noted = _description(folder / DEVICE)
    records = read_records(folder / RUNS)
    energy, log, remarks = _energy_of(folder / ENERGY)
    before = [f"before the run: {text}" for text in noted.warnings if text not in records.notes]
    notes = (*records.notes, *before, *noted.happenings, *remarks)
    all_figures = figures(replace(records, notes=notes), energy, log)
    return DeviceResult(
        **vars(noted) | {"device": noted.device or folder.name}, run=folder.parent.name, figures=all_figures, remarks=tuple(remarks)
    )


def _energy_of(path: Path) -> tuple[EnergyReport | None, RunLog | None, list[str]]:
    """Returns a log's joules, the log, and why there are no joules. All are empty if there is no log."""
    if not path.exists():
        return None, None, []
    try:
        log = read_log(path)
    except EdgeError as error:
        return None, None, [f"no joules: {error}"]
    energy, remarks = joules_of(path, log)
    return energy, log if energy else None, remarks


def joules_of(path: Path, log: RunLog) -> tuple[EnergyReport | None, list[str]]:
    """Returns the joules of a log that was read from `path`, or None and the reason."""
    if awaits_table(log):
        return None, [f"joules need the table of the external meter: edge-bench report {path} --external TABLE"]
    try:
        return energy_figures(log), []
    except EdgeError as error:
        return None, [f"no joules: {error}"]


def find_results(places: Sequence[Path]) -> tuple[list[DeviceResult], list[str]]:
    """Returns all results below the folders `places`, and why others cannot be read. Raises RequestError if none can be read."""
    folders = sorted({path.parent for place in places for path in place.rglob(RUNS)})
    if not folders:
        raise RequestError(f"no {RUNS} found below {', '.join(map(str, places))}; give the --results folder of earlier runs")
    results, failures = list[DeviceResult](), list[str]()
    for folder in folders:
        try:
            results.append(read_result(folder))
        except EdgeError as error:
            failures.append(str(error))
    if not results:
        raise RequestError("; ".join(failures))
    return results, failures


def _description(path: Path) -> DeviceDescription:
    if not path.exists():
        return DeviceDescription()
    with errors_as(RequestError, f"{path} is not a device description", "collect the run again", OSError, ValueError, RecursionError):
        description = from_json(DeviceDescription, json.loads(read_at_most(path, MAX_DESCRIPTION_BYTES).decode()), "device", exact=True)
        if description.schema != SCHEMA:
            raise ValueError(f"schema {description.schema}; this version reads {SCHEMA}: upgrade edge-mtp")
    return description


def comparison_tables(results: Sequence[DeviceResult], *, wide: bool = False) -> list[TextTable]:
    """Returns the tables with rows: speed, energy per scope, warnings and incidents. All figures of joules are included only if `wide`."""
    speeds = [(result, row) for result in results for row in result.figures.overall]
    prompts = [(result, row) for result in results for row in result.figures.by_context if row.variant.policy == PLAIN]
    tables = [
        table_of("devices", "Devices", speeds, _SPEEDS),
        table_of("first-token", "First token by prompt length", prompts, (*_SPEEDS[:4], *_PROMPTS)),
        *_energy(results, wide=wide),
        _incidents(results),
    ]
    return [table for table in tables if table.rows]


def _peak(result: DeviceResult) -> int | None:
    return max((memory.peak_bytes for memory in result.figures.records.memory), default=None)


def _of_row(heading: str, cell: Callable[[Row], str]) -> tuple[str, Callable[[tuple[DeviceResult, Row]], str]]:
    """Turns a column of a row into a column of a (device, row) pair."""
    return heading, lambda pair: cell(pair[1])


_PROMPTS = [_of_row(*column) for column in PROMPTS]
_SPEEDS: Columns[tuple[DeviceResult, Row]] = (
    ("", lambda pair: pair[0].label),
    ("run", lambda pair: pair[0].run),
    ("bundle", lambda pair: f"{(header := pair[0].figures.records.header).bundle} {header.weights}".strip()),
    ("", lambda pair: pair[1].variant.label),
    ("tok/s", lambda pair: f"{pair[1].tokens_per_second:.1f}"),
    ("over plain [95%]", lambda pair: ratio_text(pair[1].speed_up)),
    ("claim", lambda pair: pair[1].claim),
    ("accepted", lambda pair: share(pair[1].acceptance_rate)),
    *_PROMPTS,
    ("peak MB", lambda pair: megabytes(_peak(pair[0]))),
    ("hottest °C", lambda pair: NONE if pair[0].hottest_c is None else f"{pair[0].hottest_c:.0f}"),
)


def _energy(results: Sequence[DeviceResult], *, wide: bool) -> list[TextTable]:
    first, others = list[tuple[str, bool, tuple[str, ...]]](), list[tuple[str, bool, tuple[str, ...]]]()
    for result in results:
        report = result.figures.energy
        if report is None:
            continue
        scope = str(report.scope), report.estimate
        first += [(*scope, (result.label, result.run, *cells)) for cells in comparison_cells(report)]
        for variant in report.variants:
            figures = variant.joules_per_output_token, variant.net_joules_per_output_token, variant.watts
            prompt = [cell(variant) for _, cell in PROMPT_JOULES]
            others.append((*scope, (result.label, result.run, variant.name, report.meter, *map(joules, figures), *prompt)))
    note = "Joules of different scopes do not compare; each scope has its own table."
    tables = scope_tables("energy", "Joules per output token", ("", "run", *COMPARED), first, note)
    if wide:
        columns = ("", "run", "", "meter", "J/output token", "J/token above idle", "W", *(heading for heading, _ in PROMPT_JOULES))
        tables += scope_tables("energy-all", "Energy, all figures", columns, others)
    return tables


def _incidents(results: Sequence[DeviceResult]) -> TextTable:
    """Returns each device's doubts, incidents and notes. `read_result` has also added incidents and warnings to the notes."""
    rows = []
    for result in results:
        texts = dict.fromkeys((*result.figures.doubts, *result.happenings, *result.figures.records.notes))
        rows += [(result.label, result.run, text) for text in texts]
    return TextTable(name="happened", title="Doubts, warnings and incidents", columns=("", "run", ""), rows=tuple(rows))


# Records of several machines, such as those that other people sent, as results that share a table. Each file is checked first.
#
# Figures are never read from a file but computed from its measurements. An energy log belongs to the records of the same run.

# Several times what --thorough measures. The figures of larger files would take minutes and gigabytes to compute.
MAX_RECORD_BYTES, MAX_RUNS, MAX_VARIANTS = 64 << 20, 5000, 100
MAX_LOG_LINES = 120_000  # three hours of ten readings a second


def read_record_files(files: Sequence[Path]) -> tuple[list[DeviceResult], list[str]]:
    """Reads files of `--runs` and `--energy` in any order. Returns the results, and why files were left out.

    Raises RequestError if no records are left.
    """
    records, logs, refused = dict[Path, Records](), dict[Path, RunLog](), list[str]()
    for file in dict.fromkeys(files):
        try:
            _check_size(file)
            if is_energy_log(file):
                logs[file] = read_log(file, MAX_LOG_LINES)
            else:
                records[file] = _new_records(file, records)
        except EdgeError as error:
            refused.append(str(error))
    if not records:
        raise RequestError("; ".join(refused) or "energy logs alone make no table; give the files of --runs too")
    by_run = {each.header.run: file for file, each in records.items() if each.header.run}
    log_of: dict[Path, Path] = {}
    for file, log in logs.items():
        owner = by_run.get(str(log.environment.get("run")))
        if owner is None:
            refused.append(f"{file}: its run is none of the files of --runs here")
        elif log.environment.get("processor") != records[owner].header.machine.get("processor"):
            refused.append(f"{file}: it is of another machine than {owner}, which is of the same run; do not use it")
        else:
            log_of[owner] = file
    names = _short_names(list(records))
    return [_result(names[file], each, log_of.get(file), logs) for file, each in records.items()], refused


def _short_names(files: Sequence[Path]) -> dict[Path, str]:
    """Returns a name for each file: its path below the folder that all files have in common."""
    try:
        common = Path(os.path.commonpath([file.absolute().parent for file in files]))
    except ValueError:  # the files are on several drives
        return {file: str(file) for file in files}
    return {file: file.absolute().relative_to(common).as_posix() for file in files}


def _check_size(file: Path) -> None:
    """Raises RequestError if a file is not regular, or is larger than any benchmark's."""
    if not file.is_file():
        raise RequestError(f"{file} is not a regular file; give files that edge-bench run --runs and --energy wrote")
    if file.stat().st_size > MAX_RECORD_BYTES:
        raise RequestError(f"{file} has more than {MAX_RECORD_BYTES >> 20} MiB; no benchmark writes so much")


def _new_records(file: Path, known: dict[Path, Records]) -> Records:
    """Returns the records of a file. Raises RequestError if there are too many, or if a `known` file has the same measurement."""
    if read_at_most(file, MAX_RECORD_BYTES).count(b"\n") > 2 * MAX_RUNS:  # before they are parsed
        raise RequestError(f"{file} has more than {2 * MAX_RUNS} lines; no benchmark writes so many")
    records = read_records(file)
    if len(records.runs) > MAX_RUNS or len({run.variant for run in records.runs}) > MAX_VARIANTS:
        raise RequestError(f"{file} has more than {MAX_RUNS} runs or {MAX_VARIANTS} variants; no benchmark makes so many")
    for other, each in known.items():
        if _run_hashes(each) & _run_hashes(records):
            raise RequestError(f"{file}: the same measurement is in {other}")
    return records


def _run_hashes(records: Records) -> set[str]:
    """Returns a hash of each run's times. Records with a common hash have the same measurement, even if they differ otherwise."""
    timed = (f"{run.variant.label} {run.prompt} {run.repeat} {run.seconds!r} {run.round_seconds!r}" for run in records.runs)
    return {hashlib.sha256(text.encode()).hexdigest() for text in timed}


def _result(name: str, records: Records, log: Path | None, logs: dict[Path, RunLog]) -> DeviceResult:
    model, processor = (str(records.header.machine.get(key) or "") for key in ("model", "processor"))
    energy, remarks = (None, []) if log is None else joules_of(log, logs[log])
    return DeviceResult(
        device=model or processor or "unknown",
        model=processor if model else "",
        run=name,
        figures=figures(records, energy, logs[log] if log and energy else None),
        happenings=tuple(remarks),
    )
