"""Tables that compare devices and runs. Speeds share one table; joules are compared within one meter scope only."""

from __future__ import annotations

from collections.abc import Sequence

from edge_bench.devices.results import DeviceResult
from edge_bench.report.figures import Row
from edge_bench.report.tables import NONE, TextTable, milliseconds, ratio_text, share
from edge_devices.energy.text import figure_text


def comparison_tables(results: Sequence[DeviceResult]) -> list[TextTable]:
    """Returns the tables that have rows: speed, energy per scope, warnings and incidents."""
    tables = [_speed(results), *_energy(results), _incidents(results)]
    return [table for table in tables if table.rows]


def _speed(results: Sequence[DeviceResult]) -> TextTable:
    rows = []
    for result in results:
        peak = max((memory.peak_bytes for memory in result.figures.records.memory), default=None)
        hot = NONE if result.hottest_c is None else f"{result.hottest_c:.0f}"
        rows += [_row(result, row, peak, hot) for row in result.figures.overall]
    columns = ("", "run", "bundle", "", "tok/s", "over plain [95%]", "accepted", "first token ms", "peak MB", "hottest °C")
    return TextTable(name="devices", title="Devices", columns=columns, rows=tuple(rows))


def _row(result: DeviceResult, row: Row, peak: int | None, hot: str) -> tuple[str, ...]:
    return (
        result.label,
        result.run,
        result.figures.records.header.bundle,
        row.variant.label,
        f"{row.tokens_per_second:.1f}",
        ratio_text(row.speed_up),
        share(row.acceptance_rate),
        milliseconds(row.first_token_seconds),
        NONE if peak is None else f"{peak / 1e6:.0f}",
        hot,
    )


def _energy(results: Sequence[DeviceResult]) -> list[TextTable]:
    """One table per scope, with estimates apart: joules of a package and of a battery do not compare."""
    groups: dict[tuple[str, bool], list[tuple[str, ...]]] = {}
    for result in results:
        report = result.figures.energy
        for one in report.variants if report else ():
            assert report is not None
            values = (one.joules_per_output_token, one.net_joules_per_output_token, one.watts)
            cells = (figure_text(value) if value else NONE for value in values)
            groups.setdefault((str(report.scope), report.estimate), []).append((result.label, result.run, one.name, report.meter, *cells))
    columns = ("", "run", "", "meter", "J/output token", "above idle", "W")
    return [
        TextTable(
            name=f"energy-{scope}{'-estimate' if estimate else ''}",
            columns=columns,
            rows=tuple(rows),
            title=f"Energy, scope {scope}" + (" (ESTIMATE, nothing was measured)" if estimate else ""),
            note="Joules of different scopes do not compare; each scope has its own table.",
        )
        for (scope, estimate), rows in groups.items()
    ]


def _incidents(results: Sequence[DeviceResult]) -> TextTable:
    rows = [
        (result.label, result.run, when, text)
        for result in results
        for when, texts in (("before", result.warnings), ("during", result.incidents))
        for text in texts
    ]
    return TextTable(name="happened", title="Warnings and incidents", columns=("", "run", "", ""), rows=tuple(rows))
