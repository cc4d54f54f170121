"""Records of several machines, such as those that strangers sent, as results that share a table. Each is checked first.

Figures are never taken from a file: they are computed from its measurements. An energy log belongs to the record of the same run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from edge_bench.devices.results import DeviceResult, joules_of
from edge_bench.measure.records import Records, read_records
from edge_bench.report.figures import figures
from edge_devices.energy.run_log import RunLog, is_energy_log, read_log
from edge_devices.errors import EdgeError
from edge_devices.files.limited_read import read_at_most
from edge_runtime.errors import RequestError

# Several times what --thorough measures: figures of more would cost minutes and gigabytes.
MAX_BYTES, MAX_RUNS, MAX_VARIANTS = 64 << 20, 5000, 100
MAX_LOG_LINES = 120_000  # three hours of ten readings a second


def read_record_files(files: Sequence[Path]) -> tuple[list[DeviceResult], list[str]]:
    """Reads files of `--runs` and of `--energy` in any order; returns the results, and why files were left out.

    Raises RequestError where no record is left.
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
    """Returns a name for each file: its path without the folders that all have in common."""
    try:
        common = Path(os.path.commonpath([file.absolute().parent for file in files]))
    except ValueError:  # on several drives
        return {file: str(file) for file in files}
    return {file: file.absolute().relative_to(common).as_posix() for file in files}


def _check_size(file: Path) -> None:
    """Raises RequestError for what is no regular file, or larger than any benchmark makes it."""
    if not file.is_file():
        raise RequestError(f"{file} is not a regular file; give files that edge-bench run --runs and --energy wrote")
    if file.stat().st_size > MAX_BYTES:
        raise RequestError(f"{file} has more than {MAX_BYTES >> 20} MiB; no benchmark writes so much")


def _new_records(file: Path, known: dict[Path, Records]) -> Records:
    """Returns the records of a file. Raises RequestError for more than any benchmark measures, or a measurement that is known already."""
    if read_at_most(file, MAX_BYTES).count(b"\n") > 2 * MAX_RUNS:  # before they are parsed
        raise RequestError(f"{file} has more than {2 * MAX_RUNS} lines; no benchmark writes so many")
    records = read_records(file)
    if len(records.runs) > MAX_RUNS or len({run.variant for run in records.runs}) > MAX_VARIANTS:
        raise RequestError(f"{file} has more than {MAX_RUNS} runs or {MAX_VARIANTS} variants; no benchmark makes so many")
    for other, each in known.items():
        if _run_hashes(each) & _run_hashes(records):
            raise RequestError(f"{file}: the same measurement is in {other}")
    return records


def _run_hashes(records: Records) -> set[str]:
    """Returns a hash of each run's times: records with equal hashes hold the same measurement, whatever else they say."""
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
