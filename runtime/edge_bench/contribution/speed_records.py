"""The part of a record that needs no meter: speeds, acceptance, cost curve, first token, and whether rows keep their bits.

It is the raw records of a benchmark, one JSON line each, without any text; every figure is computed again from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_bench.contribution.energy_records import EnergyRecord, inflated, read_part
from edge_bench.measure.records import read_records
from edge_bench.measure.variants import PLAIN
from edge_bench.report.figures import Figures, Row, figures
from edge_bench.report.tables import NONE, TextTable, milliseconds, ratio_text, share
from edge_devices.errors import printable
from edge_runtime.bundle.exported_quality import exported_quality
from edge_runtime.drafting.policies import DEFAULT_POLICY
from edge_runtime.errors import RequestError

MIN_REPEATS = 3
# Several times what --thorough measures: figures of more would cost minutes and gigabytes.
MAX_RUNS, MAX_VARIANTS = 5000, 100
RULES = (
    f"plain decoding and drafts were measured, with at least {MIN_REPEATS} repeats of every prompt",
    "the benchmark ended, on a machine that was not busy (its own records say so)",
)
COLUMNS = (
    "device",
    "bundle",
    "engine",
    "plain tok/s",
    "drafts tok/s",
    "over plain [95%]",
    "accepted",
    "by kind of text",
    "by position",
    "first token ms",
    "verify of 8 / of 1",
    "KL",
    "same text",
    "rows",
)


@dataclass(frozen=True, kw_only=True)
class CheckedSpeeds:
    """Speeds of a record, computed from its raw records."""

    path: Path
    record: EnergyRecord
    figures: Figures

    @property
    def runs(self) -> frozenset[str]:
        """A hash of each run's times: records that share one hold the same measurement."""
        timed = (
            f"{run.variant.label} {run.prompt} {run.repeat} {run.seconds!r} {run.round_seconds!r}" for run in self.figures.records.runs
        )
        return frozenset(hashlib.sha256(text.encode()).hexdigest() for text in timed)

    def to_json(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "sources": {role: source.origin for role, source in self.record.sources.items()},
            "parity": self.record.parity,
            "figures": self.figures.to_json(),
        }


def check_speeds(path: Path, record: EnergyRecord) -> CheckedSpeeds:
    """Returns the figures of a record's benchmark. Raises RequestError where they are none, or of another bundle than the record's."""
    data = inflated(path, record.runs, record.runs_sha256)
    if data.count(b"\n") > 2 * MAX_RUNS:  # before they are parsed
        raise RequestError(f"{path}: its benchmark has more than {2 * MAX_RUNS} lines; no benchmark writes so many")
    records = read_part(path, data, read_records, "its benchmark is not valid", "the records")
    if len(records.runs) > MAX_RUNS or len({run.variant for run in records.runs}) > MAX_VARIANTS:
        raise RequestError(f"{path}: its benchmark has more than {MAX_RUNS} runs or {MAX_VARIANTS} variants; no benchmark makes so many")
    measured = sorted((file.role, file.quantization or "", file.bytes) for file in records.header.files)
    if measured != sorted((file.role, file.quantization or "", file.bytes) for file in record.files):
        raise RequestError(f"{path}: its benchmark is of another bundle than the record; do not use it")
    return CheckedSpeeds(path=path, record=record, figures=figures(records))


def invalid_speeds(checked: CheckedSpeeds) -> list[str]:
    """Returns why speeds are not pooled; an empty list if they are."""
    computed = checked.figures
    reasons = [f"the benchmark is {text}" for text in computed.records.doubts()]
    reasons += [text for text in computed.records.notes if text.startswith("stopped")]
    if _drafting(computed) is None or not any(row.variant.policy == PLAIN for row in computed.overall):
        reasons.append("plain decoding or drafts were not measured")
    repeats: dict[tuple[str, str, int], int] = {}
    for run in computed.records.runs:
        place = run.variant.label, run.domain, run.prompt
        repeats[place] = repeats.get(place, 0) + 1
    if repeats and min(repeats.values()) < MIN_REPEATS:
        reasons.append(f"{min(repeats.values())} repeats of a prompt count, {MIN_REPEATS} are needed")
    return reasons


def speed_tables(speeds: Sequence[CheckedSpeeds]) -> list[TextTable]:
    """Returns the table of speeds; nothing without any."""
    rows = tuple(tuple(map(printable, _row(checked))) for checked in speeds)
    note = "The rules: " + "; ".join(RULES) + ". Rows: whether drafts leave greedy text as it is on that machine."
    return [TextTable(name="speeds", title="Speeds", columns=COLUMNS, rows=rows, note=note)] if rows else []


def _drafting(computed: Figures) -> Row | None:
    """The default policy; the first variant that drafts if that was not measured."""
    drafting = [row for row in computed.overall if row.variant.policy != PLAIN and row.speed_up is not None]
    return next((row for row in drafting if row.variant.policy == DEFAULT_POLICY), next(iter(drafting), None))


def _row(checked: CheckedSpeeds) -> tuple[str, ...]:
    computed, record = checked.figures, checked.record
    header, drafts = computed.records.header, _drafting(computed)
    plain = next((row for row in computed.overall if row.variant.policy == PLAIN), None)
    kinds = [row for row in computed.by_domain if drafts is not None and row.variant == drafts.variant]
    quality = next((each for part in _formats(record.parity) if (each := exported_quality(part)) is not None), None)
    first = plain.first_token_seconds if plain is not None else None
    target = next((file.quantization or "" for file in record.files if file.role == "target"), "")
    rows = computed.records.rows
    return (
        str(header.machine.get("model") or header.machine.get("processor") or "unknown"),
        f"{record.target or record.bundle} {target}",
        str(header.settings.get("backend") or NONE),
        NONE if plain is None else f"{plain.tokens_per_second:.1f}",
        NONE if drafts is None else f"{drafts.tokens_per_second:.1f}",
        NONE if drafts is None else ratio_text(drafts.speed_up),
        NONE if drafts is None else share(drafts.acceptance_rate),
        ", ".join(f"{row.domain} {share(row.acceptance_rate)}" for row in kinds) or NONE,
        " ".join(f"{value:.0%}" for value in drafts.acceptance_by_position) if drafts is not None else NONE,
        milliseconds(first),
        _verify_ratio(computed),
        NONE if quality is None else f"{quality.mean_kl:.3g}",
        NONE if drafts is None or not drafts.compared else f"{drafts.equal} of {drafts.compared}",
        NONE if rows is None else rows.verdict,
    )


def _formats(parity: dict[str, Any] | None) -> list[Any]:
    """The parts of a manifest's parity that may hold what an export keeps: of GGUF files, and of ONNX graphs."""
    return [] if parity is None else [parity, parity.get("onnx")]


def _verify_ratio(computed: Figures) -> str:
    for curve in computed.records.cost_curves:
        if len(curve.verify_seconds) >= 8 and curve.verify_seconds[0] > 0:
            return f"{curve.verify_seconds[7] / curve.verify_seconds[0]:.2f}"
    return NONE
