"""Pools records of many devices: checks each part of each, and puts what is valid into tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from edge_bench.contribution.energy_records import (
    COLUMNS,
    RULES,
    SUFFIX,
    CheckedRecord,
    EnergyRecord,
    check_record,
    invalid,
    mlperf_fields,
    parsed_record,
    read_record,
)
from edge_bench.contribution.speed_records import CheckedSpeeds, check_speeds, invalid_speeds, speed_tables
from edge_bench.report.tables import NONE, PROMPT_JOULES, TextTable, joules, scope_tables
from edge_devices.energy.intervals import mean_interval
from edge_devices.energy.report import ratio_text
from edge_devices.errors import EdgeError, printable
from edge_runtime.bundle.signature import check_file_signature
from edge_runtime.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Joules (`valid`) and speeds that are pooled; files whose joules or speeds are not, with reasons, and sentences about refused ones."""

    valid: tuple[CheckedRecord, ...]
    speeds: tuple[CheckedSpeeds, ...]
    not_valid: tuple[tuple[Path, tuple[str, ...]], ...]
    refused: tuple[str, ...]
    signed: bool

    def to_json(self) -> dict[str, Any]:
        records = [
            {
                "file": str(checked.path),
                "device": checked.device,
                "weights": checked.weights,
                "environment": checked.run_log.environment,
                "mlperf": [mlperf_fields(checked, variant) for variant in checked.report.variants],
                **checked.report.to_json(),
            }
            for checked in self.valid
        ]
        not_valid = [{"file": str(path), "reasons": list(reasons)} for path, reasons in self.not_valid]
        speeds = [checked.to_json() for checked in self.speeds]
        return {
            "records": records,
            "speeds": speeds,
            "not_valid": not_valid,
            "refused": list(self.refused),
        }


def pool_records(places: Sequence[Path], public_key: Path | None = None) -> Pool:
    """Checks all records in files and folders; of those that share readings, the first valid one counts.

    With `public_key`, unsigned ones are refused.

    Raises RequestError where there is no file at all.
    """
    files = [file for place in places for file in (sorted(place.rglob(f"*{SUFFIX}")) if place.is_dir() else [place])]
    if not files:
        raise RequestError(f"no {SUFFIX} file below {', '.join(map(str, places))}; give files of edge-bench contribute")
    joules: _Kept[CheckedRecord] = _Kept(check_record, lambda checked: checked.windows, invalid)
    speeds: _Kept[CheckedSpeeds] = _Kept(check_speeds, lambda checked: checked.runs, invalid_speeds)
    refused = []
    for file in files:
        try:
            if file not in places and not file.is_file():  # a pipe, which nobody may ever write to
                raise RequestError(f"{file} is no file")
            data = read_record(file)
            if public_key is not None:  # before strangers' readings are computed with
                check_file_signature(file, data, public_key)
            record = parsed_record(file, data)
        except EdgeError as error:
            refused.append(str(error))
            continue
        if not record.log and not record.runs:
            refused.append(f"{file} holds neither joules nor speeds; measure again")
        refused += [*(joules.add(file, record) if record.log else ()), *(speeds.add(file, record) if record.runs else ())]
    return Pool(
        valid=tuple(joules.valid),
        speeds=tuple(speeds.valid),
        not_valid=(*joules.not_valid, *speeds.not_valid),
        refused=tuple(refused),
        signed=public_key is not None,
    )


Checked = TypeVar("Checked")


class _Kept(Generic[Checked]):
    """The records of one kind that count: valid ones, the first of those that share a measurement."""

    def __init__(
        self,
        check: Callable[[Path, EnergyRecord], Checked],
        hashes: Callable[[Checked], frozenset[str]],
        reasons: Callable[[Checked], list[str]],
    ) -> None:
        self._check, self._hashes, self._reasons = check, hashes, reasons
        self._counted: set[str] = set()
        self.valid: list[Checked] = []
        self.not_valid: list[tuple[Path, tuple[str, ...]]] = []

    def add(self, path: Path, record: EnergyRecord) -> list[str]:
        """Adds a record to those that it belongs to; returns why it is refused, if it is."""
        try:
            checked = self._check(path, record)
        except EdgeError as error:
            return [str(error)]
        hashes = self._hashes(checked)
        if self._counted & hashes:
            return [f"{path}: the same measurement is there already"]
        if reasons := self._reasons(checked):
            self.not_valid.append((path, tuple(reasons)))
            return []
        self._counted |= hashes
        self.valid.append(checked)
        return []


def pool_tables(pool: Pool) -> list[TextTable]:
    """Returns the table of speeds, one of joules per scope with estimates apart, then the records that do not count."""
    groups: dict[tuple[bool, str], list[CheckedRecord]] = {}
    for checked in pool.valid:
        groups.setdefault((checked.report.estimate, str(checked.report.scope)), []).append(checked)
    rows = [
        (scope, estimate, tuple(map(printable, cells)))
        for (estimate, scope), records in sorted(groups.items())
        for cells in [*(row for checked in records for row in _rows(checked, signed=pool.signed)), *_means(records)]
    ]
    left_out = [(printable(str(path)), printable("; ".join(reasons))) for path, reasons in pool.not_valid]
    left_out += [("", printable(text)) for text in pool.refused]
    note = "The rules: " + "; ".join(RULES) + "."
    left = [TextTable(name="left-out", title="Left out", columns=("record", "why"), rows=tuple(left_out), note=note)] if left_out else []
    joules = scope_tables("joules", "Joules", COLUMNS, rows, "Joules of different scopes do not compare; idle power is included.")
    return speed_tables(pool.speeds) + joules + left


def _rows(checked: CheckedRecord, *, signed: bool) -> list[tuple[str, ...]]:
    return [
        (
            checked.device,
            _bundle_name(checked),
            variant.name,
            checked.report.meter,
            joules(variant.joules_per_output_token),
            joules(variant.net_joules_per_output_token),
            ratio_text(variant.ratio_to_baseline) if variant.ratio_to_baseline else NONE,
            f"{variant.tokens_per_second:.1f}" if variant.tokens_per_second else NONE,
            *(cell(variant) for _, cell in PROMPT_JOULES),
            "yes" if signed else NONE,
        )
        for variant in checked.report.variants
    ]


def _bundle_name(checked: CheckedRecord) -> str:
    return f"{checked.record.bundle} {checked.quantization}"


def _means(records: Sequence[CheckedRecord]) -> list[tuple[str, ...]]:
    """Means over records of one device and equal weights: their interval is how such devices differ."""
    groups: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
    for checked in records:
        for variant in checked.report.variants:
            if figure := variant.joules_per_output_token:
                groups.setdefault((checked.device, checked.weights, variant.name), []).append((_bundle_name(checked), figure.value))
    rows: list[tuple[str, ...]] = []
    for (device, _, name), group in groups.items():
        if len(group) > 1:
            mean = mean_interval([value for _, value in group], range(len(group)))
            rows.append((f"mean of {len(group)} × {device}", group[0][0], name, NONE, joules(mean), *[NONE] * (len(COLUMNS) - 5)))
    return rows
