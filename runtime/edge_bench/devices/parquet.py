"""Results of many devices as one folder of Parquet files, with a row per request, and a row per variant and meter if energy was read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from edge_bench.devices.results import DeviceResult
from edge_bench.report.tables import Columns, TextTable, scope_tables, share, table_of
from edge_runtime.errors import RequestError

REQUESTS, ENERGY = "requests", "energy"
Fields = tuple[tuple[str, pa.DataType, Callable[[Any], Any]], ...]
# The columns of each kind of file: name, type, and a function of the pair (a device's result, one of its requests or variants).
_RESULT: Fields = (
    ("run", pa.string(), lambda pair: pair[0].run),
    ("device", pa.string(), lambda pair: pair[0].device),
    ("model", pa.string(), lambda pair: pair[0].model),
    ("bundle", pa.string(), lambda pair: pair[0].figures.records.header.bundle),
)
_REQUEST: Fields = (
    *_RESULT,
    ("created_at", pa.string(), lambda pair: pair[0].figures.records.header.created_at),
    ("part", pa.string(), lambda pair: pair[1].part),
    ("domain", pa.string(), lambda pair: pair[1].domain),
    ("prompt", pa.int32(), lambda pair: pair[1].prompt),
    ("repeat", pa.int32(), lambda pair: pair[1].repeat),
    ("variant", pa.string(), lambda pair: pair[1].variant.label),
    ("tokens", pa.int64(), lambda pair: pair[1].tokens),
    ("seconds", pa.float64(), lambda pair: pair[1].seconds),
    ("tokens_per_second", pa.float64(), lambda pair: pair[1].tokens / pair[1].seconds),
    ("drafted", pa.int64(), lambda pair: pair[1].drafted),
    ("accepted", pa.int64(), lambda pair: pair[1].accepted),
    ("output", pa.string(), lambda pair: pair[1].output),
)
_VARIANT: Fields = (
    *_RESULT,
    ("variant", pa.string(), lambda pair: pair[1].name),
    ("scope", pa.string(), lambda pair: str(pair[0].figures.energy.scope)),
    ("meter", pa.string(), lambda pair: pair[0].figures.energy.meter),
    ("estimate", pa.bool_(), lambda pair: pair[0].figures.energy.estimate),
    ("joules_per_output_token", pa.float64(), lambda pair: pair[1].joules_per_output_token.value),
    ("low", pa.float64(), lambda pair: pair[1].joules_per_output_token.low),
    ("high", pa.float64(), lambda pair: pair[1].joules_per_output_token.high),
)


def write_parquet(folder: Path, result: DeviceResult) -> None:
    """Adds a device's rows, which replace earlier rows of the same run and device. Raises RequestError if that fails."""
    name = f"{result.run}-{result.device}.parquet".replace("/", "-").replace(":", "-")
    variants = result.figures.energy.variants if result.figures.energy else ()
    measured = [variant for variant in variants if variant.joules_per_output_token]
    for kind, items, fields in ((REQUESTS, result.figures.records.runs, _REQUEST), (ENERGY, measured, _VARIANT)):
        if not items:
            continue
        columns = {column: pa.array([value((result, item)) for item in items], type_) for column, type_, value in fields}
        partial = folder / kind / f".{name}.partial"
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(columns), partial)
            partial.replace(folder / kind / name)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise RequestError(f"{folder} cannot be written ({error}); make room, or choose another --results") from error


def fleet_tables(folder: Path) -> list[TextTable]:
    """Returns the folder's tables: speeds per device, bundle and variant over all runs, and one energy table per scope."""
    tables = [_speeds(folder / REQUESTS)] if (folder / REQUESTS).is_dir() else []
    return tables + (_joules(folder / ENERGY) if (folder / ENERGY).is_dir() else [])


def _aggregated(rows: pa.Table, keys: list[str], figures: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return rows.group_by(keys).aggregate(figures).sort_by([(key, "ascending") for key in keys]).to_pylist()  # type: ignore[no-any-return]


_SPEEDS: Columns[dict[str, Any]] = (
    ("", lambda row: row["device"]),
    ("model", lambda row: row["model"]),
    ("bundle", lambda row: row["bundle"]),
    ("", lambda row: row["variant"]),
    ("runs", lambda row: str(row["run_count_distinct"])),
    ("tok/s", lambda row: f"{row['tokens_sum'] / row['seconds_sum']:.1f}"),
    ("accepted", lambda row: share(row["accepted_sum"] / row["drafted_sum"] if row["drafted_sum"] else None)),
)


def _speeds(folder: Path) -> TextTable:
    rows = ds.dataset(folder, format="parquet").to_table(filter=ds.field("part") == "domains")
    sums = [("run", "count_distinct"), ("tokens", "sum"), ("seconds", "sum"), ("drafted", "sum"), ("accepted", "sum")]
    sums_by_variant = _aggregated(rows, ["device", "model", "bundle", "variant"], sums)
    return table_of(
        "fleet", "Fleet", sums_by_variant, _SPEEDS, "All runs in the Parquet folder together: emitted tokens / decoding seconds."
    )


def _joules(folder: Path) -> list[TextTable]:
    rows = ds.dataset(folder, format="parquet").to_table()
    means = _aggregated(
        rows, ["scope", "estimate", "device", "model", "variant", "meter"], [("joules_per_output_token", "mean"), ("run", "count_distinct")]
    )
    columns = ("", "model", "", "meter", "runs", "J/output token")
    cells = [
        (
            row["scope"],
            row["estimate"],
            (
                *(row[key] for key in ("device", "model", "variant", "meter")),
                str(row["run_count_distinct"]),
                f"{row['joules_per_output_token_mean']:.3g}",
            ),
        )
        for row in means
    ]
    return scope_tables("fleet-energy", "Fleet: energy", columns, cells)
