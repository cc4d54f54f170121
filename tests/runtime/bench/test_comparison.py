"""Devices side by side: joules of different scopes never share a table; Parquet rows are those of the records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench_records import whole_benchmark
from edge_bench.devices.results import DeviceResult, comparison_tables
from edge_bench.measure.records import collect
from edge_bench.report.figures import figures
from edge_devices.energy.intervals import of_error
from edge_devices.energy.report import EnergyReport, VariantEnergy
from edge_devices.meters.base import Scope


def result(device: str, scope: Scope | None = None, *, estimate: bool = False, joules: float = 1.0) -> DeviceResult:
    energy = None
    if scope is not None:
        variant = VariantEnergy(name="plain", n=5, refused=[], joules_per_output_token=of_error(joules, 0.01, 4, 5))
        energy = EnergyReport(
            meter=f"meter of {device}",
            scope=scope,
            estimate=estimate,
            refresh_s=1.0,
            systematic="",
            idle=None,
            variants=[variant],
            warnings=[],
            phase_watts={},
        )
    return DeviceResult(device=device, run="one", figures=figures(collect(whole_benchmark()), energy), happenings=("it got hot",))


def test_scopes_are_never_mixed() -> None:
    results = [
        result("phone", Scope.DEVICE),
        result("other phone", Scope.DEVICE),
        result("laptop", Scope.PACKAGE),
        result("pi", Scope.BOARD),
        result("guess", Scope.DEVICE, estimate=True),
        result("nothing"),
    ]
    tables = {table.name: table for table in comparison_tables(results)}
    energy = {name: [row[0] for row in table.rows] for name, table in tables.items() if name.startswith("energy")}
    assert energy == {
        f"energy-{Scope.DEVICE}": ["phone", "other phone"],
        f"energy-{Scope.PACKAGE}": ["laptop"],
        f"energy-{Scope.BOARD}": ["pi"],
        f"energy-{Scope.DEVICE}-estimate": ["guess"],
    }
    assert "ESTIMATE" in tables[f"energy-{Scope.DEVICE}-estimate"].title
    assert len(tables["devices"].rows) == 6 * 6
    assert "joule" not in tables["devices"].title + " ".join(tables["devices"].columns).lower()
    assert [row[2] for row in tables["happened"].rows][:2] == ["it got hot", "something was left out"]


def test_parquet_keeps_scopes_apart_and_replaces_a_run(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs edge-mtp[fleet]")
    from edge_bench.devices.parquet import fleet_tables, write_parquet

    for item in (result("phone", Scope.DEVICE, joules=2.0), result("laptop", Scope.PACKAGE), result("phone", Scope.DEVICE, joules=4.0)):
        write_parquet(tmp_path, item)
    write_parquet(tmp_path, replace(result("phone", Scope.DEVICE, joules=6.0), run="two"))
    tables = {table.name: table for table in fleet_tables(tmp_path)}
    assert tables[f"fleet-energy-{Scope.DEVICE}"].rows == (("phone", "", "plain", "meter of phone", "2", "5"),)
    assert tables[f"fleet-energy-{Scope.PACKAGE}"].rows == (("laptop", "", "plain", "meter of laptop", "1", "1"),)
    plain = next(row for row in tables["fleet"].rows if row[0] == "phone" and row[3] == "plain")
    assert plain[4] == "2"
    runs = [run for run in collect(whole_benchmark()).runs if run.variant.label == "plain" and run.part == "domains"]
    assert float(plain[5]) == pytest.approx(sum(r.tokens for r in runs) / sum(r.seconds for r in runs), abs=0.06)
