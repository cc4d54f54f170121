"""The figures of speed and energy as tables, for both the terminal and the HTML page."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from edge_bench.measure.records import NO_ROW_KERNELS, OURS, PLAIN, Header, KvTypeCost
from edge_bench.report.figures import WIDEST, Figures, ImageRow, Level, Ratio, Row
from edge_devices.energy.intervals import Interval
from edge_devices.energy.report import WIDEST_RATIO, EnergyReport, VariantEnergy, figure_text, head_lines
from edge_devices.energy.report import ratio_text as energy_ratio_text
from edge_devices.energy.run_log import RunLog
from edge_devices.errors import markdown_text, printable
from edge_devices.meters.base import Kind, scope_words
from edge_runtime.backends.interface import NO_KERNELS
from edge_runtime.bundle.manifest import FIGURES_OF, files_key
from edge_runtime.drafting.policies import DEFAULT_POLICY

if TYPE_CHECKING:
    from rich.table import Table


NONE = "-"
Item = TypeVar("Item")
# For each column its heading, and the function that returns its cell for an item.
Columns = Sequence[tuple[str, Callable[[Item], str]]]


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of texts. The first column names the row; `note` explains how to read the table."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def table_of(name: str, title: str, items: Iterable[Item], columns: Columns[Item], note: str = "") -> TextTable:
    """Returns a table with a row for each item."""
    rows = tuple(tuple(cell(item) for _, cell in columns) for item in items)
    return TextTable(name=name, title=title, columns=tuple(heading for heading, _ in columns), rows=rows, note=note)


def grid(name: str, title: str, cells: Mapping[tuple[str, str], str], note: str = "") -> TextTable:
    """Returns a table of cells by (row, column). Rows and columns are in the order of their first occurrence."""
    columns = tuple(dict.fromkeys(column for _, column in cells))
    rows = tuple((row, *(cells.get((row, column), NONE) for column in columns)) for row in dict.fromkeys(row for row, _ in cells))
    return TextTable(name=name, title=title, columns=("", *columns), rows=rows, note=note)


def markdown_lines(table: TextTable) -> list[str]:
    """Returns the lines of a table in Markdown, with its title and note."""
    rows = [table.columns, [":--", *["--:"] * (len(table.columns) - 1)], *table.rows]
    lines = ["", f"### {markdown_text(table.title)}", "", *(f"| {' | '.join(map(markdown_text, row))} |" for row in rows)]
    return [*lines, "", markdown_text(table.note)] if table.note else lines


def print_tables(tables: Sequence[TextTable], *, head: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
    """Prints lines, tables and notes. Wide tables are wrapped in a terminal, but not in a pipe."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False, highlight=False)
    for line in filter(None, head):
        console.print(printable(line))
    for table in tables:
        console.print(_rich(table))
        if table.note:
            console.print(printable(table.note))
        console.print()
    for text in notes:
        console.print(printable(f"note: {text}"), soft_wrap=True)  # not wrapped, so that a command in it can be copied


def _rich(table: TextTable) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(printable(table.title), style="bold"), title_justify="left")
    for number, column in enumerate(table.columns):
        drawn.add_column(Text(printable(column)), justify="right" if number else "left")
    for row in table.rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    return drawn


NOT_DETERMINED = "not determined"


def scope_tables(
    name: str, title: str, columns: Sequence[str], rows: Iterable[tuple[str, bool, tuple[str, ...]]], note: str = ""
) -> list[TextTable]:
    """Returns one table per meter scope, and separate ones for estimates. Joules of a package and of a battery cannot be compared.

    `rows` has the scope, whether the row is an estimate, and the cells.
    """
    groups: dict[tuple[str, bool], list[tuple[str, ...]]] = {}
    for scope, estimate, cells in rows:
        groups.setdefault((scope, estimate), []).append(cells)
    return [
        TextTable(
            name=f"{name}-{scope}{'-estimate' if estimate else ''}",
            title=scope_title(title, scope, estimate=estimate),
            columns=tuple(columns),
            rows=tuple(cells),
            note=note,
        )
        for (scope, estimate), cells in groups.items()
    ]


def scope_title(title: str, scope: str, *, estimate: bool) -> str:
    """Returns a title that names the meter's scope."""
    return f"{title}, scope {scope_words(scope)}" + (" (ESTIMATE, nothing was measured)" if estimate else "")


def joules(figure: Interval | None) -> str:
    """Returns the text of an energy figure with its interval."""
    return figure_text(figure) if figure else NONE


PROMPT_JOULES: Columns[VariantEnergy] = (
    ("prompt tokens", lambda variant: NONE if variant.prompt_tokens is None else f"{variant.prompt_tokens:.3g}"),
    ("J/prompt token", lambda variant: joules(variant.joules_per_prompt_token)),
)
_ENERGY: Columns[VariantEnergy] = (
    ("", lambda variant: variant.name),
    ("J/output token", lambda variant: joules(variant.joules_per_output_token)),
    ("J/token above idle", lambda variant: joules(variant.net_joules_per_output_token)),
    *PROMPT_JOULES,
    ("J/request", lambda variant: joules(variant.joules_per_request)),
    ("W", lambda variant: joules(variant.watts)),
    ("of plain", lambda variant: energy_ratio_text(variant.ratio_to_baseline) if variant.ratio_to_baseline else NONE),
    ("claim", lambda variant: "" if not variant.ratio_to_baseline else "saves energy" if variant.saves_energy else "no win claimed"),
    ("phases", lambda variant: variant.phase_method),
    ("refused", lambda variant: "; ".join(variant.refused)),
)


def energy_tables(report: EnergyReport, *, wide: bool = True) -> list[TextTable]:
    """Returns the tables of an energy measurement: joules with and without drafts, then, if `wide`, all figures and those by phase."""
    rows = tuple((*cells, scope_cell(report)) for cells in comparison_cells(report))
    note = ". ".join([*head_lines(report), *claims(report)]) + "."
    first = TextTable(name="energy", title="Joules per output token", columns=(*COMPARED, "scope"), rows=rows, note=note)
    title = scope_title("Energy, all figures", report.scope, estimate=report.estimate)
    others = [table_of("energy-all", title, report.variants, _ENERGY), _energy_phases(report)] if wide else []
    return [table for table in (first, *others) if table.rows]


# The columns of `comparison_cells`: what a reader wants to know first about joules.
COMPARED = ("plain", "drafts", "ratio", "interval")
OTHER_WORK = ("image ", "prompt ")  # how the names of variants begin that do not decode


def comparison_cells(report: EnergyReport) -> list[tuple[str, str, str, str]]:
    """Returns a row for each variant that drafts: joules per token without and with drafts, and their ratio with its interval."""
    decoding = [variant for variant in report.variants if not variant.name.startswith(OTHER_WORK)]
    plain = next((variant.joules_per_output_token for variant in decoding if variant.name == PLAIN), None)
    drafting = [variant for variant in decoding if variant.name != PLAIN]
    rows = [
        (_value(plain), f"{_value(each.joules_per_output_token)} ({each.name})", *_ratio_cells(report, each, plain)) for each in drafting
    ]
    return rows or [(_value(plain), NONE, NONE, NONE)]


def _value(figure: Interval | None) -> str:
    return f"{figure.value:.3g}" if figure else NONE


def _ratio_cells(report: EnergyReport, variant: VariantEnergy, plain: Interval | None) -> tuple[str, str]:
    ratio, drafts = variant.ratio_to_baseline, variant.joules_per_output_token
    if ratio is None and plain is not None and drafts is not None and plain.value > 0:
        return f"{drafts.value / plain.value:.2f}", "none: a single repeat"
    if ratio is None:
        return NONE, NONE
    if not math.isfinite(ratio.half):
        return f"{ratio.value:.2f}", "none"
    if not is_determined(report, ratio):
        return NOT_DETERMINED, f"n={ratio.n}, the runs differ too much"
    basis = "the model's range" if report.estimate else f"n={ratio.n}"
    return f"{ratio.value:.2f}", f"[{ratio.low:.2f}, {ratio.high:.2f}] ({basis})"


def is_determined(report: EnergyReport, ratio: Interval) -> bool:
    """Whether a ratio of joules is precise enough to show. An estimate always is, because the user asked for it with its range."""
    return report.estimate or not math.isfinite(ratio.half) or ratio.high <= WIDEST_RATIO * max(ratio.low, 0.0)


def scope_cell(report: EnergyReport) -> str:
    """Returns the meter's scope, or that the figures are an estimate."""
    return "ESTIMATE, not measured" if report.estimate else str(report.scope)


def claims(report: EnergyReport) -> list[str]:
    """Returns sentences about which variants save energy and which repeats do not count."""
    sentences = [f"{variant.name} saves energy" for variant in report.variants if variant.saves_energy and not report.estimate]
    refused = [f"{variant.name}, {reason}" for variant in report.variants for reason in variant.refused]
    return sentences + ([f"Repeats that do not count: {'; '.join(refused)}"] if refused else [])


def joules_words(report: EnergyReport, name: str) -> str:
    """Returns the end of a sentence about a variant's joules compared with plain decoding; empty if they were not measured."""
    ratio = next((variant.ratio_to_baseline for variant in report.variants if variant.name == name), None)
    if ratio is None:
        return ""
    if not is_determined(report, ratio):
        return "; how many joules per token it takes beside plain decoding is not determined: the runs differ too much"
    interval = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if math.isfinite(ratio.half) else " (no interval)"
    kind = "an ESTIMATE, nothing was measured" if report.estimate else f"measured, {report.scope}"
    return f"; it takes {ratio.value:.2f}{interval} times the joules per token of plain decoding ({kind})"


def _energy_phases(report: EnergyReport) -> TextTable:
    variants = [variant for variant in report.variants if len(variant.phase_joules) > 1]

    def phase(name: str) -> tuple[str, Callable[[VariantEnergy], str]]:
        return name, lambda variant: joules(variant.phase_joules.get(name))

    columns: Columns[VariantEnergy] = (
        ("", lambda variant: variant.name),
        *map(phase, dict.fromkeys(name for variant in variants for name in variant.phase_joules)),
        ("method", lambda variant: variant.phase_method.replace("_", " ")),
        ("sum is off", lambda variant: NONE if variant.closure is None else f"{variant.closure:+.1%}"),
        ("", lambda variant: "" if variant.closes else "does NOT close"),
    )
    note = (
        "Joules per request. Calibrated: the watts of a phase come from loops of that phase alone, and the sum of the phases is compared"
        " with the measurement (largest error of any repeat). Time proportional: without such loops, all phases are assumed to take the"
        " mean power."
    )
    return table_of("energy-phases", scope_title("Energy by phase", report.scope, estimate=report.estimate), variants, columns, note)


def meter_table(log: RunLog) -> TextTable:
    """Returns a table of the facts and measured characteristics of a log's meter."""
    facts, measured = log.facts, log.characteristics
    rows = [
        ("scope", str(facts.scope)),
        ("kind", str(facts.kind)),
        ("source", facts.source),
        ("refresh interval", f"{measured.refresh_s:.3g} s, at most {measured.longest_gap_s:.3g} s"),
        ("lag behind the load", f"{measured.lag_s:.3g} s"),
        ("invalid readings", f"{measured.zero_rate:.1%}"),
        ("time per reading", f"{1000 * measured.read_s:.3g} ms"),
        ("resolution", f"{facts.resolution:g} {'J' if facts.kind is Kind.COUNTER else 'W'}"),
        ("readings", f"{len(log.trace.times)}"),
        ("not in any interval", facts.systematic),
        *(("note", text) for text in facts.notes),
    ]
    return TextTable(name="meter", title=f"The meter {facts.name}", columns=("", ""), rows=tuple(rows))


def verdict(figures: Figures) -> str:
    """Returns the report's sentence about drafts; empty if nothing was compared with plain decoding.

    It is about the default policy, which users get, rather than about the variant that came out best by chance.
    """
    rows = [row for row in figures.overall if row.variant.side == OURS and row.speed_up]
    if not rows:
        return ""
    defaults = [row for row in rows if row.variant.policy == DEFAULT_POLICY]
    judged = max(defaults or rows, key=lambda row: row.speed_up.value if row.speed_up else 0.0)
    others = len(defaults or rows)
    chosen = "" if others == 1 else f", the fastest of {others} measured,"
    doubts = f"Nothing follows from these figures. They are {'; '.join(figures.doubts)}. " if figures.doubts else ""
    speed = _unclaimed(judged) if doubts else _speed(judged)
    joules = joules_words(figures.energy, judged.variant.label) if figures.energy else ""
    return f"{doubts}{judged.variant.label}{chosen} {speed}{_output(judged)}{joules}."


def _unclaimed(row: Row) -> str:
    """Returns a row's ratio in words that make no claim, for measurements with doubts."""
    assert row.speed_up is not None
    if not row.speed_up.determined:
        return "was measured too unevenly to be compared with plain decoding"
    return f"has {ratio_text(row.speed_up)} times the speed of plain decoding in what was measured"


def _speed(row: Row) -> str:
    ratio = row.speed_up
    assert ratio is not None
    if row.acceptance_rate is None:
        return f"drafted nothing: its {ratio.value:.2f} times the speed of plain decoding is noise"
    if ratio.low is None or ratio.high is None:
        return f"was {ratio.value:.2f} times as fast as plain decoding in a single repeat, which has no interval"
    interval = f"[{ratio.low:.2f}, {ratio.high:.2f}]"
    if not ratio.determined:
        return f"was measured too unevenly to be compared with plain decoding: the 95% interval spans a factor of more than {WIDEST}"
    if not ratio.verdict:
        return f"is neither faster nor slower than plain decoding in these runs: {ratio.value:.2f} times as fast, 95% {interval}"
    slower = " (slower)" if ratio.verdict == "slower" else ""
    return f"is {ratio.value:.2f} times as fast as plain decoding{slower}, 95% {interval}"


def _output(row: Row) -> str:
    if not row.compared:
        return "; the output was not compared"
    if row.equal == row.compared:
        return f"; the output is the same in all {row.compared} runs"
    return f"; the output is the same in {row.equal} of {row.compared} runs"


# The phases of a record, with their names for readers.
PHASE_NAMES = {"draft": "drafting", "verify": "checking", "other": "other"}


def all_tables(figures: Figures, *, wide: bool = True) -> list[TextTable]:
    """Returns all tables that have rows, in the order of a report. All figures of joules are included only if `wide`."""
    tables = [
        table_of("variants", "All domains", figures.overall, _VARIANTS, _VARIANTS_NOTE),
        _by_domain(figures),
        _against(figures),
        _positions(figures),
        _sources(figures),
        table_of("phases", "Time per token by phase, ms", [row for row in figures.overall if row.phase_seconds_per_token], _PHASES),
        _contexts(figures),
        prompt_table(figures.by_context),
        _costs(figures),
        table_of("concurrency", "Concurrent requests", figures.levels, _LEVELS, _LEVELS_NOTE),
        kv_table(figures.records.kv_types),
        table_of("images", "Images", figures.images, _IMAGES, _IMAGES_NOTE),
        *(energy_tables(figures.energy, wide=wide) if figures.energy else ()),
        _memory(figures),
    ]
    return [table for table in tables if table.rows]


def kv_table(costs: Iterable[KvTypeCost]) -> TextTable:
    """Returns the table of KV cache types."""
    return table_of("kv", "KV cache types", costs, _KV_TYPES, _KV_NOTE)


def machine_line(header: Header) -> str:
    """Returns one line about bundle, machine and settings."""
    machine, settings = header.machine, header.settings
    processor = machine.get("processor") or machine.get("architecture") or "unknown processor"
    roles = {"target": "model", "drafter": "drafter"}
    files = ", ".join(f"{roles[file.role]} {file.quantization or file.format}" for file in header.files if file.role in roles)
    threads, tokens, repeats = (settings.get(key, "?") for key in ("threads", "tokens", "repeats"))
    versions = ", ".join(f"{name} {number}" for name, number in {"edge-mtp": header.version, **header.engines}.items())
    kernels = {None: "", NO_ROW_KERNELS: f", {NO_KERNELS}"}.get(header.row_kernels, f", row kernels {header.row_kernels}")
    return (
        f"{header.bundle} ({files}) on {processor}, {machine.get('usable_processors', '?')} processors, {threads} threads{kernels};"
        f" {tokens} tokens, {repeats} repeats; {versions}, {header.created_at}"
    )


def ratio_text(ratio: Ratio | None) -> str:
    """Returns a ratio with its interval."""
    if ratio is None:
        return NONE
    if not ratio.determined:
        return NOT_DETERMINED
    return f"{ratio.value:.2f}" if ratio.low is None else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def share(value: float | None) -> str:
    """Returns a share in percent."""
    return NONE if value is None else f"{value:.1%}"


def milliseconds(seconds: float | None) -> str:
    """Returns seconds in milliseconds."""
    return NONE if seconds is None else f"{1000 * seconds:.1f}" if seconds < 1 else f"{1000 * seconds:.0f}"


def megabytes(size: int | None) -> str:
    """Returns bytes in whole megabytes."""
    return f"{size / 1e6:.0f}" if size else NONE


def _of(equal: int, compared: int) -> str:
    return f"{equal} of {compared}" if compared else NONE


# Columns about the prompt. The time of the first token means nothing without the prompt's length.
PROMPTS: Columns[Row] = (
    ("prompt tokens", lambda row: f"{row.prompt_tokens:g}"),
    ("first token ms", lambda row: milliseconds(row.first_token_seconds)),
    ("prompt tok/s", lambda row: NONE if row.prompt_tokens_per_second is None else f"{row.prompt_tokens_per_second:.0f}"),
)
_NAME: tuple[str, Callable[[Row], str]] = ("", lambda row: row.variant.label)
_VARIANTS: Columns[Row] = (
    _NAME,
    ("tok/s", lambda row: f"{row.tokens_per_second:.1f}"),
    ("over plain [95%]", lambda row: ratio_text(row.speed_up)),
    ("same output", lambda row: _of(row.equal, row.compared)),
    ("claim", lambda row: row.claim),
    ("worst prompt", lambda row: f"{row.speed_up.worst:.2f}" if row.speed_up else NONE),
    ("accepted", lambda row: share(row.acceptance_rate)),
    ("mean acceptance length", lambda row: f"{row.mean_acceptance_length:.2f}" if row.mean_acceptance_length else NONE),
    *PROMPTS,
    ("token P50 ms", lambda row: milliseconds(row.token_p50_seconds)),
    ("token P95 ms", lambda row: milliseconds(row.token_p95_seconds)),
)
_VARIANTS_NOTE = (
    "Over plain: geometric mean over the domains of the paired ratios to plain decoding; the interval is for measuring the same"
    " prompts again. Mean acceptance length: tokens / steps of the model. Prompt tok/s: prompt tokens / seconds until the first token."
    " P50 and P95: median and 95th percentile."
)


def _phase(name: str) -> tuple[str, Callable[[Row], str]]:
    return f"{PHASE_NAMES[name]} ms", lambda row: f"{1000 * (row.phase_seconds_per_token or {})[name]:.2f}"


_PHASES: Columns[Row] = (
    _NAME,
    *map(_phase, PHASE_NAMES),
    ("all ms", lambda row: f"{1000 * sum((row.phase_seconds_per_token or {}).values()):.2f}"),
)
_LEVELS: Columns[Level] = (
    ("", lambda level: level.variant.label),
    ("clients", lambda level: str(level.clients)),
    ("tok/s total", lambda level: f"{level.tokens_per_second:.1f}"),
    ("token P50 ms", lambda level: milliseconds(level.token_p50_seconds)),
    ("token P95 ms", lambda level: milliseconds(level.token_p95_seconds)),
    ("request P50 ms", lambda level: milliseconds(level.request_p50_seconds)),
    ("request P95 ms", lambda level: milliseconds(level.request_p95_seconds)),
    ("peak MB", lambda level: megabytes(level.peak_bytes)),
    ("same output", lambda level: _of(level.equal, level.compared)),
)
_LEVELS_NOTE = "Each client sends its next request when its previous one ends."
_KV_TYPES: Columns[KvTypeCost] = (
    ("", lambda cost: cost.kv_type),
    ("cache MB", lambda cost: f"{cost.cache_bytes / 1e6:.2f}"),
    ("accepted", lambda cost: share(cost.acceptance_rate)),
    ("tok/s", lambda cost: f"{cost.tokens_per_second:.1f}"),
    ("KL mean, nats", lambda cost: f"{cost.kl_mean:.2e}"),
    ("KL max, nats", lambda cost: f"{cost.kl_max:.2e}"),
    ("same best", lambda cost: share(cost.same_best)),
)
_KV_NOTE = "KL divergence from the f16 cache's next-token distributions, in nats per token; all types are measured on the same texts."
_IMAGES: Columns[ImageRow] = (
    ("budget, tokens", lambda image: str(image.budget)),
    ("tokens", lambda image: str(image.rows)),
    ("encode ms", lambda image: milliseconds(image.encode_seconds)),
    ("prefill ms", lambda image: milliseconds(image.prefill_seconds)),
    ("both ms", lambda image: milliseconds(image.encode_seconds + image.prefill_seconds)),
)
_IMAGES_NOTE = "A square image of noise with a short question, medians of the repeats; joules are in the energy tables."


def _by_domain(figures: Figures) -> TextTable:
    cells = {(row.variant.label, row.domain or ""): ratio_text(row.speed_up) for row in figures.by_domain if row.speed_up}
    return grid("domains", "Speed-up over plain decoding by domain", cells)


def _against(figures: Figures) -> TextTable:
    cells = {(pair.ours.label, f"over {pair.peer.label}"): ratio_text(pair.ratio) for pair in figures.against}
    note = "Rows over columns. Of the fixed lengths only each program's best is shown, chosen by the same figures."
    return grid("against", "Ours over llama.cpp's own", cells, note)


def _positions(figures: Figures) -> TextTable:
    cells = {
        (row.variant.label, f"draft {place}"): share(accepted)
        for row in figures.overall
        for place, accepted in enumerate(row.acceptance_by_position, start=1)
    }
    return grid("acceptance", "Acceptance by position", cells, "Share of steps that accepted this draft, among those that drafted it.")


def _sources(figures: Figures) -> TextTable:
    drafted = [row for row in figures.overall if row.accepted_from]
    names = sorted({source for row in drafted for source in row.accepted_from})
    cells = {
        (row.variant.label, source): share(part)
        for row in drafted
        for source, part in [*((name, row.accepted_from.get(name, 0.0)) for name in names), ("model", 1 - sum(row.accepted_from.values()))]
    }
    note = "Share of the tokens that were drafts of this source; the model chose the others itself, one in each step."
    return grid("sources", "Where tokens came from", cells, note)


def _contexts(figures: Figures) -> TextTable:
    cells: dict[tuple[str, str], str] = {}
    for row in figures.by_context:
        over = f" ({row.speed_up.value:.2f})" if row.speed_up else ""
        cells[row.variant.label, row.domain or ""] = f"{row.tokens_per_second:.1f}{over}"
    note = "Tokens per second (speed-up over plain decoding) after a prompt of this many tokens, made by joining all prompts."
    return grid("contexts", "Tokens per second by prompt length", cells, note)


def prompt_table(rows: Iterable[Row]) -> TextTable:
    """Returns the table of first tokens by prompt length, for plain decoding only, because drafts begin after the first token."""
    plain = [row for row in rows if row.variant.policy == PLAIN and row.first_token_seconds is not None]
    return table_of("first-token", "First token by prompt length", plain, (_NAME, *PROMPTS), "Medians of the repeats.")


def _costs(figures: Figures) -> TextTable:
    curves = figures.records.cost_curves
    cells: dict[tuple[str, str], str] = {}
    for curve in curves:
        step = curve.draft_step_seconds
        cells["drafted token", curve.drafter] = NONE if step is None else f"{1000 * step:.3g}"
        for rows, seconds in enumerate(curve.verify_seconds, start=1):
            cells[f"step of {rows}", curve.drafter] = f"{1000 * seconds:.3g}"
    note = f"One drafted token, and one step of the model over this many tokens, after {curves[0].length} tokens." if curves else ""
    return grid("costs", "Time of a step, ms", cells, note)


def _memory(figures: Figures) -> TextTable:
    sizes = [(f"peak, {m.drafter} drafter", f"{m.sequences} x {m.context} tokens", m.peak_bytes) for m in figures.records.memory]
    sizes += [(file.role, file.quantization or file.format, file.bytes) for file in figures.records.header.files]
    rows = tuple((name, what, f"{size / 1e6:.1f}") for name, what, size in sizes)
    note = "Peaks are resident sizes of a separate process, including mapped files."
    return TextTable(name="memory", title="Memory and files, MB", columns=("", "", "MB"), rows=rows, note=note)


def notes(figures: Figures) -> Sequence[str]:
    """Returns remarks about the tables: what was left out, whether drafts can change text, and how many outputs differ."""
    remarks, rows = list(figures.records.notes), figures.records.rows
    if rows is not None:
        remarks.append(rows.sentence())
    differing = sum(row.compared - row.equal for row in figures.overall)
    if differing:
        remarks.append(
            f"{differing} of {sum(row.compared for row in figures.overall)} outputs differ from plain decoding;"
            " edge-run generate --verify-lossless prints the first difference"
        )
    return remarks


def print_report(figures: Figures, *, wide: bool = False) -> None:
    """Prints all tables. All figures of joules are included only if `wide`."""
    head = (machine_line(figures.records.header), verdict(figures))
    print_tables(all_tables(figures, wide=wide), head=head, notes=notes(figures))


def markdown(figures: Figures) -> str:
    """Returns the report as a section of a model card. Its first line identifies the measured files."""
    header = figures.records.header
    lines = [FIGURES_OF.format(files_key(header.files)), f"## Measured: {markdown_text(machine_line(header))}", ""]
    lines += [f"- {markdown_text(text)}" for text in filter(None, (verdict(figures), *notes(figures)))]
    return "\n".join([*lines, *(line for table in all_tables(figures) for line in markdown_lines(table)), ""])
