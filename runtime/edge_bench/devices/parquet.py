"""Results of many devices as one folder of Parquet files: one row per request, and one per variant and meter where energy was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from edge_bench.devices.results import DeviceResult
from edge_bench.report.tables import NONE, TextTable
from edge_runtime.errors import RequestError

REQUESTS, ENERGY = "requests", "energy"
REQUEST_COLUMNS = pa.schema(
    [
        ("run", pa.string()),
        ("device", pa.string()),
        ("model", pa.string()),
        ("bundle", pa.string()),
        ("created_at", pa.string()),
        ("part", pa.string()),
        ("domain", pa.string()),
        ("prompt", pa.int32()),
        ("repeat", pa.int32()),
        ("variant", pa.string()),
        ("tokens", pa.int64()),
        ("seconds", pa.float64()),
        ("tokens_per_second", pa.float64()),
        ("drafted", pa.int64()),
        ("accepted", pa.int64()),
        ("output", pa.string()),
    ]
)
ENERGY_COLUMNS = pa.schema(
    [
        ("run", pa.string()),
        ("device", pa.string()),
        ("model", pa.string()),
        ("bundle", pa.string()),
        ("variant", pa.string()),
        ("scope", pa.string()),
        ("meter", pa.string()),
        ("estimate", pa.bool_()),
        ("joules_per_output_token", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
    ]
)


def write_parquet(folder: Path, result: DeviceResult) -> None:
    """Adds a device's rows; the same run of the same device replaces its earlier rows. Raises RequestError if that fails."""
    name = f"{result.run}-{result.device}.parquet".replace("/", "-").replace(":", "-")
    for kind, rows, columns in ((REQUESTS, _requests(result), REQUEST_COLUMNS), (ENERGY, _energy(result), ENERGY_COLUMNS)):
        if not rows:
            continue
        partial = folder / kind / f".{name}.partial"
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows, schema=columns), partial)
            partial.replace(folder / kind / name)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise RequestError(f"{folder} cannot be written ({error}); make room, or choose another --results") from error


def fleet_tables(folder: Path) -> list[TextTable]:
    """Returns the folder's tables: requests per device, bundle and variant over all runs; one energy table per scope."""
    tables = [_speeds(folder / REQUESTS)] if (folder / REQUESTS).is_dir() else []
    return tables + (_joules(folder / ENERGY) if (folder / ENERGY).is_dir() else [])


def _speeds(folder: Path) -> TextTable:
    rows = ds.dataset(folder, format="parquet").to_table(filter=ds.field("part") == "domains")
    keys = ["device", "model", "bundle", "variant"]
    wanted = [("run", "count_distinct"), ("tokens", "sum"), ("seconds", "sum"), ("drafted", "sum"), ("accepted", "sum")]
    found = rows.group_by(keys).aggregate(wanted).sort_by([(key, "ascending") for key in keys]).to_pylist()
    cells = tuple(
        (
            row["device"],
            row["model"],
            row["bundle"],
            row["variant"],
            str(row["run_count_distinct"]),
            f"{row['tokens_sum'] / row['seconds_sum']:.1f}",
            f"{row['accepted_sum'] / row['drafted_sum']:.1%}" if row["drafted_sum"] else NONE,
        )
        for row in found
    )
    columns = ("", "model", "bundle", "", "runs", "tok/s", "accepted")
    note = "All runs in the Parquet folder together: emitted tokens / decoding seconds."
    return TextTable(name="fleet", title="Fleet", columns=columns, rows=cells, note=note)


def _joules(folder: Path) -> list[TextTable]:
    keys = ["scope", "estimate", "device", "model", "variant", "meter"]
    rows = ds.dataset(folder, format="parquet").to_table()
    found = (
        rows.group_by(keys)
        .aggregate([("joules_per_output_token", "mean"), ("run", "count_distinct")])
        .sort_by([(key, "ascending") for key in keys])
    )
    groups: dict[tuple[str, bool], list[tuple[str, ...]]] = {}
    for row in found.to_pylist():
        cells = (
            row["device"],
            row["model"],
            row["variant"],
            row["meter"],
            str(row["run_count_distinct"]),
            f"{row['joules_per_output_token_mean']:.3g}",
        )
        groups.setdefault((row["scope"], row["estimate"]), []).append(cells)
    columns = ("", "model", "", "meter", "runs", "J/output token")
    return [
        TextTable(
            name=f"fleet-energy-{scope}",
            title=f"Fleet: energy, scope {scope}" + (" (ESTIMATE)" if estimate else ""),
            columns=columns,
            rows=tuple(cells),
        )
        for (scope, estimate), cells in groups.items()
    ]


def _requests(result: DeviceResult) -> list[dict[str, Any]]:
    header = result.figures.records.header
    return [
        {
            "run": result.run,
            "device": result.device,
            "model": result.model,
            "bundle": header.bundle,
            "created_at": header.created_at,
            "part": run.part,
            "domain": run.domain,
            "prompt": run.prompt,
            "repeat": run.repeat,
            "variant": run.variant.label,
            "tokens": run.tokens,
            "seconds": run.seconds,
            "tokens_per_second": run.tokens / run.seconds,
            "drafted": run.drafted,
            "accepted": run.accepted,
            "output": run.output,
        }
        for run in result.figures.records.runs
    ]


def _energy(result: DeviceResult) -> list[dict[str, Any]]:
    report = result.figures.energy
    return [
        {
            "run": result.run,
            "device": result.device,
            "model": result.model,
            "bundle": result.figures.records.header.bundle,
            "variant": one.name,
            "scope": str(report.scope),
            "meter": report.meter,
            "estimate": report.estimate,
            "joules_per_output_token": one.joules_per_output_token.value,
            "low": one.joules_per_output_token.low,
            "high": one.joules_per_output_token.high,
        }
        for one in (report.variants if report else ())
        if report is not None and one.joules_per_output_token
    ]
