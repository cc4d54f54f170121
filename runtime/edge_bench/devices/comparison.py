"""Tables that compare devices and runs. Speeds share one table; joules are compared within one meter scope only."""

from __future__ import annotations

from collections.abc import Sequence

from edge_bench.devices.results import DeviceResult
from edge_bench.report.figures import Row
from edge_bench.report.tables import NONE, Columns, TextTable, joules, megabytes, milliseconds, ratio_text, scope_tables, share, table_of


def comparison_tables(results: Sequence[DeviceResult]) -> list[TextTable]:
    """Returns the tables that have rows: speed, energy per scope, warnings and incidents."""
    speeds = [(result, row) for result in results for row in result.figures.overall]
    tables = [table_of("devices", "Devices", speeds, _SPEEDS), *_energy(results), _incidents(results)]
    return [table for table in tables if table.rows]


def _peak(result: DeviceResult) -> int | None:
    return max((memory.peak_bytes for memory in result.figures.records.memory), default=None)


_SPEEDS: Columns[tuple[DeviceResult, Row]] = (
    ("", lambda pair: pair[0].label),
    ("run", lambda pair: pair[0].run),
    ("bundle", lambda pair: pair[0].figures.records.header.bundle),
    ("", lambda pair: pair[1].variant.label),
    ("tok/s", lambda pair: f"{pair[1].tokens_per_second:.1f}"),
    ("over plain [95%]", lambda pair: ratio_text(pair[1].speed_up)),
    ("accepted", lambda pair: share(pair[1].acceptance_rate)),
    ("first token ms", lambda pair: milliseconds(pair[1].first_token_seconds)),
    ("peak MB", lambda pair: megabytes(_peak(pair[0]))),
    ("hottest °C", lambda pair: NONE if pair[0].hottest_c is None else f"{pair[0].hottest_c:.0f}"),
)


def _energy(results: Sequence[DeviceResult]) -> list[TextTable]:
    rows = []
    for result in results:
        report = result.figures.energy
        for variant in report.variants if report else ():
            assert report is not None
            figures = variant.joules_per_output_token, variant.net_joules_per_output_token, variant.watts
            rows.append((str(report.scope), report.estimate, (result.label, result.run, variant.name, report.meter, *map(joules, figures))))
    columns = ("", "run", "", "meter", "J/output token", "above idle", "W")
    note = "Joules of different scopes do not compare; each scope has its own table."
    return scope_tables("energy", "Energy", columns, rows, note)


def _incidents(results: Sequence[DeviceResult]) -> TextTable:
    rows = [
        (result.label, result.run, when, text)
        for result in results
        for when, texts in (("before", result.warnings), ("during", result.happenings))
        for text in texts
    ]
    return TextTable(name="happened", title="Warnings and incidents", columns=("", "run", "", ""), rows=tuple(rows))
