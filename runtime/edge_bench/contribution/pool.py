"""Tables of contributed records: joules per token by scope, estimates apart, and means of records of equal devices and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_bench.contribution.record import CheckedRecord, check_record, read_record
from edge_bench.contribution.rules import RULES, invalid
from edge_bench.report.tables import NONE, TextTable
from edge_devices.energy.intervals import mean_interval
from edge_devices.energy.text import figure_text, ratio_text
from edge_devices.errors import EdgeError, printable
from edge_runtime.bundle.signature import check_file_signature
from edge_runtime.errors import RequestError

SUFFIX = ".json"
COLUMNS = ("device", "bundle", "", "meter", "J/output token [95%]", "above idle", "over plain", "tok/s", "signed")


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Records by what became of them: pooled, read but not valid (with reasons), and refused (with the sentence)."""

    valid: tuple[CheckedRecord, ...]
    not_valid: tuple[tuple[CheckedRecord, tuple[str, ...]], ...]
    refused: tuple[str, ...]
    signed: bool


def pool_records(places: Sequence[Path], public_key: Path | None = None) -> Pool:
    """Checks all records in files and folders; of those that share readings, the first valid one counts.

    With `public_key`, unsigned ones are refused.

    Raises RequestError where there is no file at all.
    """
    files = [file for place in places for file in (sorted(place.rglob(f"*{SUFFIX}")) if place.is_dir() else [place])]
    if not files:
        raise RequestError(f"no {SUFFIX} file below {', '.join(map(str, places))}; give files of edge-bench contribute")
    valid, not_valid, refused = [], [], []
    seen: set[str] = set()
    for file in files:
        try:
            if file not in places and not file.is_file():  # a pipe, which nobody may ever write to
                raise RequestError(f"{file} is no file")
            data = read_record(file)
            if public_key is not None:  # before strangers' readings are computed with
                check_file_signature(file, data, public_key)
            checked = check_record(file, data)
        except EdgeError as error:
            refused.append(str(error))
            continue
        if seen & checked.windows:
            refused.append(f"{file}: the same measurement is there already")
        elif reasons := invalid(checked):
            not_valid.append((checked, tuple(reasons)))
        else:
            seen |= checked.windows
            valid.append(checked)
    return Pool(valid=tuple(valid), not_valid=tuple(not_valid), refused=tuple(refused), signed=public_key is not None)


def pool_tables(pool: Pool) -> list[TextTable]:
    """Returns one table per scope, with estimates apart, then the records that do not count."""
    groups: dict[tuple[bool, str], list[CheckedRecord]] = {}
    for checked in pool.valid:
        groups.setdefault((checked.report.estimate, str(checked.report.scope)), []).append(checked)
    tables = [_scope(scope, records, estimate=estimate, signed=pool.signed) for (estimate, scope), records in sorted(groups.items())]
    rows = [(printable(str(checked.path)), printable("; ".join(reasons))) for checked, reasons in pool.not_valid]
    rows += [("", printable(text)) for text in pool.refused]
    note = "The rules: " + "; ".join(RULES) + "."
    return [
        *tables,
        *([TextTable(name="left-out", title="Left out", columns=("record", "why"), rows=tuple(rows), note=note)] if rows else []),
    ]


def _scope(scope: str, records: Sequence[CheckedRecord], *, estimate: bool, signed: bool) -> TextTable:
    rows = [row for checked in records for row in _rows(checked, signed=signed)] + _means(records)
    return TextTable(
        name=f"joules-{scope}{'-estimate' if estimate else ''}",
        title="Joules without a meter (ESTIMATE, nothing was measured)" if estimate else f"Joules, scope {scope}",
        columns=COLUMNS,
        rows=tuple(tuple(map(printable, row)) for row in rows),
        note="Joules of different scopes do not compare; idle power is included.",
    )


def _rows(checked: CheckedRecord, *, signed: bool) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in checked.report.variants:
        values = (one.joules_per_output_token, one.net_joules_per_output_token)
        cells = (figure_text(value) if value else NONE for value in values)
        ratio = ratio_text(one.ratio_to_baseline) if one.ratio_to_baseline else NONE
        speed = f"{one.tokens_per_second:.1f}" if one.tokens_per_second else NONE
        name = f"{checked.record.bundle} {checked.quantization}"
        rows.append((checked.device, name, one.name, checked.report.meter, *cells, ratio, speed, "yes" if signed else NONE))
    return rows


def _means(records: Sequence[CheckedRecord]) -> list[tuple[str, ...]]:
    """Means over records of one device and equal weights: their interval is how such devices differ."""
    groups: dict[tuple[str, str, str], list[tuple[CheckedRecord, float]]] = {}
    for checked in records:
        for one in checked.report.variants:
            if one.joules_per_output_token:
                groups.setdefault((checked.device, checked.weights, one.name), []).append((checked, one.joules_per_output_token.value))
    rows: list[tuple[str, ...]] = []
    for (device, _, name), found in groups.items():
        if len(found) > 1:
            mean = mean_interval([value for _, value in found], range(len(found)))
            bundle = f"{found[0][0].record.bundle} {found[0][0].quantization}"
            rows.append((f"mean of {len(found)} × {device}", bundle, name, NONE, figure_text(mean), NONE, NONE, NONE, NONE))
    return rows
