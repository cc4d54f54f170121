"""The figures as text tables, for both the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_bench.measure.records import Header
from edge_bench.report.figures import Figures, Row
from edge_bench.report.ratios import Ratio
from edge_devices.energy.report import EnergyReport
from edge_devices.energy.run_log import RunLog
from edge_devices.energy.text import figure_text, report_lines
from edge_devices.energy.text import ratio_text as energy_ratio_text
from edge_devices.meters.base import Kind

NONE = "-"
NOT_DETERMINED = "not determined"


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A text table; the first column names the row. `note` explains how to read it."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def all_tables(figures: Figures) -> list[TextTable]:
    """Returns all tables that have rows, in the order of a report."""
    tables = [
        _variants(figures),
        _by_domain(figures),
        _against(figures),
        _positions(figures),
        _sources(figures),
        _phases(figures),
        _contexts(figures),
        _costs(figures),
        _concurrency(figures),
        _kv_types(figures),
        _images(figures),
        *(energy_tables(figures.energy) if figures.energy else ()),
        _memory(figures),
    ]
    return [table for table in tables if table.rows]


def machine_line(header: Header) -> str:
    """Returns one line with bundle, machine and settings."""
    machine, settings = header.machine, header.settings
    processor = machine.get("processor") or machine.get("architecture") or "unknown processor"
    files = ", ".join(f"{file.role} {file.quantization or file.format}" for file in header.files if file.role in ("target", "drafter"))
    threads, tokens, repeats = (settings.get(key, "?") for key in ("threads", "tokens", "repeats"))
    return (
        f"{header.bundle} ({files}) on {processor}, {machine.get('usable_processors', '?')} processors, {threads} threads;"
        f" {tokens} tokens, {repeats} repeats; edge-mtp {header.version}, {header.created_at}"
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


def _of(equal: int, compared: int) -> str:
    return f"{equal} of {compared}" if compared else NONE


def _variants(figures: Figures) -> TextTable:
    rows = tuple(
        (
            row.variant.label,
            f"{row.tokens_per_second:.1f}",
            ratio_text(row.speed_up),
            _of(row.equal, row.compared),
            row.speed_up.verdict if row.speed_up else "",
            f"{row.speed_up.worst:.2f}" if row.speed_up else NONE,
            share(row.acceptance_rate),
            f"{row.mean_acceptance_length:.2f}" if row.mean_acceptance_length else NONE,
            milliseconds(row.first_token_seconds),
            milliseconds(row.token_p50_seconds),
            milliseconds(row.token_p95_seconds),
        )
        for row in figures.overall
    )
    columns = (
        "",
        "tok/s",
        "over plain [95%]",
        "same output",
        "claim",
        "worst prompt",
        "accepted",
        "mean acceptance length",
        "first token ms",
        "P50 ms",
        "P95 ms",
    )
    note = (
        "Over plain: geometric mean over the domains of the paired ratios to plain decoding; the interval is for measuring the same"
        " prompts again. Mean acceptance length: emitted tokens / target forwards. P50 and P95 are per token."
    )
    return TextTable(name="variants", title="All domains", columns=columns, rows=rows, note=note)


def _by_domain(figures: Figures) -> TextTable:
    domains = tuple(dict.fromkeys(row.domain or "" for row in figures.by_domain))
    cells = {(row.variant.label, row.domain): ratio_text(row.speed_up) for row in figures.by_domain if row.speed_up}
    rows = tuple((label, *(cells.get((label, domain), NONE) for domain in domains)) for label in dict.fromkeys(label for label, _ in cells))
    return TextTable(name="domains", title="Speed-up over plain decoding by domain", columns=("", *domains), rows=rows)


def _against(figures: Figures) -> TextTable:
    peers = tuple(dict.fromkeys(a.peer.label for a in figures.against))
    cells = {(a.ours.label, a.peer.label): ratio_text(a.ratio) for a in figures.against}
    rows = tuple((label, *(cells.get((label, peer), NONE) for peer in peers)) for label in dict.fromkeys(label for label, _ in cells))
    note = "Rows over columns. Of the fixed lengths only each program's best is shown, chosen by the same figures." if rows else ""
    return TextTable(name="against", title="Ours over llama.cpp's own", columns=("", *(f"over {p}" for p in peers)), rows=rows, note=note)


def _positions(figures: Figures) -> TextTable:
    drafted = [row for row in figures.overall if row.acceptance_by_position]
    longest = max((len(row.acceptance_by_position) for row in drafted), default=0)
    rows = tuple((row.variant.label, *_padded(map(share, row.acceptance_by_position), longest)) for row in drafted)
    columns = ("", *(f"draft {i}" for i in range(1, longest + 1)))
    note = "Share of rounds that accepted this draft, among those that drafted it."
    return TextTable(name="acceptance", title="Acceptance by position", columns=columns, rows=rows, note=note)


def _sources(figures: Figures) -> TextTable:
    drafted = [row for row in figures.overall if row.accepted_from]
    names = tuple(sorted({source for row in drafted for source in row.accepted_from}))
    rows = tuple(
        (row.variant.label, *(share(row.accepted_from.get(name, 0.0)) for name in names), share(1 - sum(row.accepted_from.values())))
        for row in drafted
    )
    note = "Share of the emitted tokens that were drafts of this source; the target chose the others itself, one in each round."
    return TextTable(name="sources", title="Where tokens came from", columns=("", *names, "target"), rows=rows, note=note)


def _padded(cells: Iterable[str], length: int) -> list[str]:
    cells = list(cells)
    return cells + [NONE] * (length - len(cells))


def _phases(figures: Figures) -> TextTable:
    def cells(row: Row) -> tuple[str, ...]:
        phases = row.phase_seconds_per_token or {}
        return (
            row.variant.label,
            *(f"{1000 * phases[name]:.2f}" for name in ("draft", "verify", "other")),
            f"{1000 * sum(phases.values()):.2f}",
        )

    rows = tuple(cells(row) for row in figures.overall if row.phase_seconds_per_token)
    return TextTable(name="phases", title="Time per token by phase, ms", columns=("", "draft", "verify", "other", "all"), rows=rows)


def _contexts(figures: Figures) -> TextTable:
    lengths = tuple(dict.fromkeys(row.domain or "" for row in figures.by_context))
    cells: dict[tuple[str, str | None], str] = {}
    for row in figures.by_context:
        over = f" ({row.speed_up.value:.2f})" if row.speed_up else ""
        cells[row.variant.label, row.domain] = f"{row.tokens_per_second:.1f}{over}"
        if row.speed_up is None:
            cells["first token, ms", row.domain] = milliseconds(row.first_token_seconds)
    rows = tuple((label, *(cells.get((label, length), NONE) for length in lengths)) for label in dict.fromkeys(label for label, _ in cells))
    note = "Tokens per second (speed-up over plain decoding) after a prompt of this many tokens, made by joining all prompts."
    return TextTable(name="contexts", title="By prompt length", columns=("", *lengths), rows=rows, note=note)


def _costs(figures: Figures) -> TextTable:
    curves = figures.records.cost_curves
    longest = max((len(curve.verify_seconds) for curve in curves), default=0)
    rows = [("draft step", *(_fine(curve.draft_step_seconds) for curve in curves))] if curves else []
    for n in range(longest):
        rows.append((f"verify of {n + 1}", *(_fine(c.verify_seconds[n]) if n < len(c.verify_seconds) else NONE for c in curves)))
    columns = ("", *(curve.drafter for curve in curves))
    note = f"One draft step, and one target forward of this many rows, after {curves[0].length} tokens." if curves else ""
    return TextTable(name="costs", title="Cost curve, ms", columns=columns, rows=tuple(rows), note=note)


def _fine(seconds: float | None) -> str:
    return NONE if seconds is None else f"{1000 * seconds:.3g}"


def _kv_types(figures: Figures) -> TextTable:
    rows = tuple(
        (
            kind.kv_type,
            f"{kind.cache_bytes / 1e6:.2f}",
            f"{kind.acceptance_rate:.1%}",
            f"{kind.tokens_per_second:.1f}",
            f"{kind.kl_mean:.2e}",
            f"{kind.kl_max:.2e}",
            f"{kind.same_best:.1%}",
        )
        for kind in figures.records.kv_types
    )
    columns = ("", "cache MB", "accepted", "tok/s", "KL mean", "KL max", "same best")
    note = (
        "KL divergence from the f16 cache's next-token distributions, in nats per token; all types are measured on the same texts."
        if rows
        else ""
    )
    return TextTable(name="kv", title="KV cache types", columns=columns, rows=rows, note=note)


def _images(figures: Figures) -> TextTable:
    rows = tuple(
        (
            str(image.budget),
            str(image.rows),
            milliseconds(image.encode_seconds),
            milliseconds(image.prefill_seconds),
            milliseconds(image.encode_seconds + image.prefill_seconds),
        )
        for image in figures.images
    )
    columns = ("budget", "soft rows", "encode ms", "prefill ms", "both ms")
    note = "A square image of noise with a short question, medians of the repeats; joules are in the energy tables." if rows else ""
    return TextTable(name="images", title="Images", columns=columns, rows=rows, note=note)


def energy_tables(report: EnergyReport) -> list[TextTable]:
    """Returns the tables of an energy measurement: all variants, and by phase if there are several."""
    tables = [_energy(report), _energy_phases(report)]
    return [table for table in tables if table.rows]


def _energy(report: EnergyReport) -> TextTable:
    rows = []
    for one in report.variants:
        ratio = one.ratio_to_baseline
        claim = "" if ratio is None else "saves energy" if one.saves_energy else "no win claimed"
        values = (
            one.joules_per_output_token,
            one.net_joules_per_output_token,
            one.joules_per_prompt_token,
            one.joules_per_request,
            one.watts,
        )
        of_plain = energy_ratio_text(ratio) if ratio else NONE
        cells = (figure_text(value) if value else NONE for value in values)
        rows.append((one.name, *cells, of_plain, claim, one.phase_method, "; ".join(one.refused)))
    columns = ("", "J/output token", "above idle", "J/prompt token", "J/request", "W", "of plain", "claim", "phases", "refused")
    note = " ".join(report_lines(report)[: 2 if report.idle else 1])
    return TextTable(name="energy", title=_energy_title("Energy", report), columns=columns, rows=tuple(rows), note=note)


def _energy_phases(report: EnergyReport) -> TextTable:
    phases = tuple(dict.fromkeys(phase for one in report.variants if len(one.phase_joules) > 1 for phase in one.phase_joules))
    rows = tuple(
        (
            one.name,
            *(figure_text(one.phase_joules[phase]) if phase in one.phase_joules else NONE for phase in phases),
            one.phase_method.replace("_", " "),
            NONE if one.closure is None else f"{one.closure:+.1%}",
            "" if one.closes else "does NOT close",
        )
        for one in report.variants
        if len(one.phase_joules) > 1
    )
    note = (
        "Joules per request. Calibrated: the watts of a phase come from loops of that phase alone, and the sum of the phases is compared"
        " with the measurement (largest error of any repeat). Time proportional: without such loops, all phases are assumed to take the"
        " mean power."
    )
    columns = ("", *phases, "method", "sum is off", "")
    return TextTable(name="energy-phases", title=_energy_title("Energy by phase", report), columns=columns, rows=rows, note=note)


def meter_table(log: RunLog) -> TextTable:
    """Returns the facts and the measured characteristics of a log's meter."""
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


def _energy_title(title: str, report: EnergyReport) -> str:
    return f"{title}, scope {report.scope}" + (" (ESTIMATE, nothing was measured)" if report.estimate else "")


def _concurrency(figures: Figures) -> TextTable:
    rows = tuple(
        (
            level.variant.label,
            str(level.clients),
            f"{level.tokens_per_second:.1f}",
            milliseconds(level.token_p50_seconds),
            milliseconds(level.token_p95_seconds),
            milliseconds(level.request_p50_seconds),
            milliseconds(level.request_p95_seconds),
            f"{level.peak_bytes / 1e6:.0f}" if level.peak_bytes else NONE,
            _of(level.equal, level.compared),
        )
        for level in figures.levels
    )
    columns = (
        "",
        "clients",
        "tok/s total",
        "token P50 ms",
        "token P95 ms",
        "request P50 ms",
        "request P95 ms",
        "peak MB",
        "same output",
    )
    note = "Each client sends its next request when its previous one ends." if rows else ""
    return TextTable(name="concurrency", title="Concurrent requests", columns=columns, rows=rows, note=note)


def _memory(figures: Figures) -> TextTable:
    rows = [
        (f"peak, {m.drafter} drafter", f"{m.sequences} x {m.context} tokens", f"{m.peak_bytes / 1e6:.1f}") for m in figures.records.memory
    ]
    rows += [(file.role, file.quantization or file.format, f"{file.bytes / 1e6:.1f}") for file in figures.records.header.files]
    note = "Peaks are resident sizes of a separate process, including mapped files."
    return TextTable(name="memory", title="Memory and files, MB", columns=("", "", "MB"), rows=tuple(rows), note=note)


def notes(figures: Figures) -> Sequence[str]:
    """Returns remarks to the tables: what was left out, and how many outputs differ."""
    remarks = list(figures.records.notes)
    differing = sum(row.compared - row.equal for row in figures.overall)
    if differing:
        remarks.append(
            f"{differing} of {sum(row.compared for row in figures.overall)} outputs differ from plain decoding: kernels for one row"
            " and for several may differ in their last bits; edge-run generate --verify-lossless prints the first difference"
        )
    return remarks
