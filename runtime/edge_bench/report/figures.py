"""Figures of a benchmark, computed from its records alone: one row per variant, and paired ratios with bootstrap intervals.

A pair is two runs of the same prompt in the same repeat. A prompt's ratio is the median of its pairs. The ratio of two variants is the
geometric mean of these over the prompts of a domain, and then over the domains.

The interval is for measuring the same prompts again; it does not cover other prompts. The standard error of the logarithm comes from a
bootstrap over the repeats of each prompt (Efron 1979). It is multiplied by sqrt(n / (n - 1)), because resamples of n repeats scatter too
little by that factor. Half of the interval is this error times a quantile of Student's t. Percentiles of the resamples are not used,
because they cannot lie outside the few measured values.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_bench.measure.conditions import undisturbed
from edge_bench.measure.records import DEFAULT, FIXED, OURS, PLAIN, Concurrency, ImageCost, Memory, Records, Run, Variant
from edge_bench.measure.runners import CONTEXTS_PART, DOMAINS_PART
from edge_devices.energy.intervals import t_quantile
from edge_devices.energy.report import EnergyReport
from edge_devices.energy.run_log import RunLog
from edge_devices.files.typed_json import to_json
from edge_runtime.session.monitor import Latencies

DRAWS = 2000
# An interval whose ends differ by more than this factor is too wide to mean anything.
WIDEST = 4
SEED = 20261121

# The logarithms of one prompt's ratios, one for each repeat that both variants have.
Logs = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio with its 95% interval, whose ends are None if there is only one repeat. `pairs` is the number of pairs.

    `worst` is the lowest ratio of a prompt.
    """

    value: float
    low: float | None
    high: float | None
    pairs: int
    worst: float

    @property
    def determined(self) -> bool:
        """Whether the runs agree well enough for the ratio to mean something. True for a single repeat, which has no interval."""
        return self.low is None or self.high is None or self.high <= WIDEST * self.low

    @property
    def verdict(self) -> str:
        """The claim that the interval supports: "faster", "slower", or "" if it contains 1, is too wide or is unknown."""
        if self.low is None or self.high is None or not self.determined:
            return ""
        return "faster" if self.low > 1 else "slower" if self.high < 1 else ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"determined": self.determined}


def speed(run: Run) -> float:
    """Returns the emitted tokens per second of decoding."""
    return run.tokens / run.seconds


def paired_logs(runs: Iterable[Run], baseline: Iterable[Run]) -> dict[str, list[Logs]]:
    """Returns the logarithms of speed / baseline speed: for each domain a list of prompts, for each prompt an array of repeats."""
    base = {(run.domain, run.prompt, run.repeat): speed(run) for run in baseline}
    prompts: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in runs:
        other = base.get((run.domain, run.prompt, run.repeat))
        if other is not None:
            prompts[run.domain, run.prompt].append(math.log(speed(run) / other))
    domains: dict[str, list[Logs]] = defaultdict(list)
    for (domain, _), logs in prompts.items():
        domains[domain].append(np.array(logs))
    return dict(domains)


def first_token_ratio(runs: Iterable[Run], others: Iterable[Run]) -> Ratio | None:
    """Returns how many times faster the first token of `runs` comes than that of `others`; None without pairs that time it."""

    def timed(each: Iterable[Run]) -> list[Run]:
        return [replace(run, tokens=1, seconds=run.first_token_seconds) for run in each if run.first_token_seconds]

    return ratio(paired_logs(timed(runs), timed(others)))


def ratio(domains: Mapping[str, list[Logs]]) -> Ratio | None:
    """Returns the ratio, and its interval, from the logarithms of each domain's prompts (`paired_logs`); None without pairs."""
    if not domains:
        return None
    prompts = [logs for domain in domains.values() for logs in domain]
    medians = [float(np.median(logs)) for logs in prompts]
    draws = np.mean([np.mean([_drawn_medians(logs) for logs in domain], axis=0) for domain in _seeded(domains)], axis=0)
    value = float(np.mean([np.mean([np.median(logs) for logs in domain]) for domain in domains.values()]))
    fewest, freedom = min(len(logs) for logs in prompts), sum(len(logs) - 1 for logs in prompts)
    half = t_quantile(freedom) * float(draws.std()) * math.sqrt(fewest / (fewest - 1)) if fewest > 1 else 0.0
    known = fewest > 1 and abs(value) + half < _LARGEST_LOG
    return Ratio(
        value=math.exp(value),
        low=math.exp(value - half) if known else None,
        high=math.exp(value + half) if known else None,
        pairs=sum(map(len, prompts)),
        worst=math.exp(min(medians)),
    )


# exp() overflows above this value.
_LARGEST_LOG = 700.0


def _seeded(domains: Mapping[str, list[Logs]]) -> Iterable[list[tuple[Logs, np.random.Generator]]]:
    """Yields each domain's prompts, each with its own fixed random generator, so that figures are reproducible."""
    for number, logs in enumerate(domains.values()):
        yield [(prompt, np.random.default_rng([SEED, number, index])) for index, prompt in enumerate(logs)]


def _drawn_medians(prompt: tuple[Logs, np.random.Generator]) -> NDArray[np.float64]:
    logs, random = prompt
    return np.median(logs[random.integers(0, len(logs), (DRAWS, len(logs)))], axis=1)


# The fields of `Figures` that have rows of variants.
ROWS = ("overall", "by_domain", "by_context")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant over all its runs, or over those of one domain. Speeds are medians, in tokens per second; shares are 0 to 1.

    `speed_up` is over edge-mtp's plain decoding; None for plain decoding itself. `mean_acceptance_length` is emitted tokens / target
    forwards. `accepted_from` is the share of the emitted tokens that came from each source of drafts. `prompt_tokens` is the median prompt
    length. `prompt_tokens_per_second` is the median of a prompt's tokens / seconds until its first new token.
    `claim` is "faster" or "slower", or the reason why nothing is claimed ("incomplete", "disturbed"), or "" if the interval contains 1 or
    is unknown. Of `compared` outputs, `equal` are the same as with plain decoding. `phase_seconds_per_token` has `draft`, `verify` and
    `other`. A figure is None if nothing was drafted, or if the program does not report it.
    """

    variant: Variant
    domain: str | None
    runs: int
    tokens_per_second: float
    speed_up: Ratio | None
    claim: str
    acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...]
    accepted_from: dict[str, float]
    mean_acceptance_length: float | None
    prompt_tokens: float
    first_token_seconds: float | None
    prompt_tokens_per_second: float | None
    token_p50_seconds: float | None
    token_p95_seconds: float | None
    phase_seconds_per_token: dict[str, float] | None
    equal: int
    compared: int


@dataclass(frozen=True, kw_only=True)
class Against:
    """The speed of a variant of edge-mtp, divided by that of a variant of a peer program."""

    ours: Variant
    peer: Variant
    ratio: Ratio


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of concurrency with one variant. `tokens_per_second` is the sum over all clients."""

    variant: Variant
    clients: int
    tokens_per_second: float
    token_p50_seconds: float | None
    token_p95_seconds: float | None
    request_p50_seconds: float | None
    request_p95_seconds: float | None
    peak_bytes: int | None
    equal: int
    compared: int


@dataclass(frozen=True, kw_only=True)
class ImageRow:
    """The median seconds of encoder and prefill, for requests with an image of at most `budget` soft rows."""

    budget: int
    rows: int
    encode_seconds: float
    prefill_seconds: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All figures: rows `overall` for each variant, `by_domain` for each variant and domain, `by_context` for each variant and length."""

    records: Records
    overall: tuple[Row, ...]
    by_domain: tuple[Row, ...]
    by_context: tuple[Row, ...]
    against: tuple[Against, ...]
    levels: tuple[Level, ...]
    images: tuple[ImageRow, ...] = ()
    energy: EnergyReport | None = None
    energy_log: RunLog | None = None
    doubts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys, without the runs themselves (see `edge-bench run --runs`)."""
        return {
            "header": to_json(self.records.header),
            **{name: [{"label": row.variant.label, **to_json(row)} for row in getattr(self, name)] for name in ROWS},
            "against": [{"label": a.ours.label, "peer_label": a.peer.label, **to_json(a)} for a in self.against],
            "concurrency": [{"label": level.variant.label, **to_json(level)} for level in self.levels],
            "cost_curves": to_json(self.records.cost_curves),
            "memory": to_json(self.records.memory),
            "kv_types": to_json(self.records.kv_types),
            "images": to_json(self.images),
            "energy": self.energy.to_json() if self.energy else None,
            "rows": self.records.rows.to_json() if self.records.rows else None,
            "doubts": list(self.doubts),
            "notes": list(self.records.notes),
        }


def figures(records: Records, energy: EnergyReport | None = None, energy_log: RunLog | None = None) -> Figures:
    """Computes all figures that the records allow, from the measurements that count. Figures without measurements stay empty."""
    counted, remarks, disturbed = _countable(records)
    domains = [run for run in counted.runs if run.part == DOMAINS_PART]
    contexts = [run for run in counted.runs if run.part == CONTEXTS_PART]
    doubts = (*records.doubts(), *disturbed)
    doubt = doubts[0].partition(":")[0] if doubts else ""
    return Figures(
        records=replace(records, notes=(*records.notes, *remarks)),
        overall=_rows(domains, doubt, split=False),
        by_domain=_rows(domains, doubt, split=True),
        by_context=_rows(contexts, doubt, split=True),
        against=_against(domains),
        levels=_levels(counted.concurrency, records.memory),
        images=_images(counted.images),
        energy=energy,
        energy_log=energy_log,
        doubts=doubts,
    )


def _countable(records: Records) -> tuple[Records, list[str], list[str]]:
    """Returns the records with the measurements that count, remarks about the others, and doubts.

    If no measurement of some variant would be left, all measurements stay, with a doubt.
    """
    runs, why = undisturbed(records.runs)
    levels, why_levels = undisturbed(records.concurrency)
    images, why_images = undisturbed(records.images)
    reasons = Counter(why) + Counter(why_levels) + Counter(why_images)
    measured: list[Run | Concurrency | ImageCost] = [*records.runs, *records.concurrency, *records.images]
    lost = dict.fromkeys(text for each in measured if each.conditions for text in each.conditions.unknown)
    remarks = [f"no longer known: {text}" for text in lost]
    words = "; ".join(f"{count} of {len(measured)} measurements: {reason}" for reason, count in reasons.items())

    def kinds(those: Records) -> set[object]:
        variants = {(run.part, run.variant) for run in those.runs} | {(level.clients, level.variant) for level in those.concurrency}
        return variants | {image.budget for image in those.images}

    counted = replace(records, runs=tuple(runs), concurrency=tuple(levels), images=tuple(images))
    if kinds(counted) != kinds(records):
        return records, remarks, [f"disturbed: {words}"]
    return counted, remarks + ([f"left out: {words}"] if words else []), []


def _grouped(runs: Iterable[Run]) -> dict[Variant, list[Run]]:
    """Returns each variant's runs, with the variants in the order of the tables. In the records, they are mixed as they ran."""
    groups: dict[Variant, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.variant].append(run)
    drafters = list(dict.fromkeys(sorted(variant.drafter for variant in groups)))

    def place(variant: Variant) -> tuple[bool, bool, int, int, int, str]:
        kind = (PLAIN, DEFAULT, FIXED).index(variant.policy) if variant.policy in (PLAIN, DEFAULT, FIXED) else 3
        return variant.side != OURS, kind > 0, drafters.index(variant.drafter), kind, variant.length or 0, variant.policy

    return {variant: groups[variant] for variant in sorted(groups, key=place)}


def _rows(runs: Sequence[Run], doubt: str, *, split: bool) -> tuple[Row, ...]:
    rows = []
    baseline = _by_domain([run for run in runs if _is_baseline(run.variant)], split=split)
    plain = {(run.domain, run.prompt): run for own in baseline.values() for run in own}
    for variant, runs_of_it in _grouped(runs).items():
        for domain, own in _by_domain(runs_of_it, split=split).items():
            rows.append(_row(variant, domain, own, baseline.get(domain, []), plain, doubt))
    return tuple(rows)


def _by_domain(runs: Iterable[Run], *, split: bool) -> dict[str | None, list[Run]]:
    groups: dict[str | None, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.domain if split else None].append(run)
    return dict(groups)


def _is_baseline(variant: Variant) -> bool:
    return variant.side == OURS and variant.policy == PLAIN


def _row(variant: Variant, domain: str | None, runs: list[Run], baseline: list[Run], plain: dict[tuple[str, int], Run], doubt: str) -> Row:
    drafted, tokens, rounds = (
        sum(f(run) for run in runs) for f in (lambda r: r.drafted, lambda r: r.tokens, lambda r: len(r.round_tokens))
    )
    latencies = Latencies()
    for run in runs:
        for seconds, count in zip(run.round_seconds, run.round_tokens, strict=True):
            latencies.add(seconds, count)
    outputs = [(run.output, plain[run.domain, run.prompt].output) for run in runs if (run.domain, run.prompt) in plain and run.output]
    speed_up = None if _is_baseline(variant) else ratio(paired_logs(runs, baseline))
    return Row(
        variant=variant,
        domain=domain,
        runs=len(runs),
        tokens_per_second=_typical_speed(runs),
        speed_up=speed_up,
        claim="" if speed_up is None else doubt or speed_up.verdict,
        acceptance_rate=sum(run.accepted for run in runs) / drafted if drafted else None,
        acceptance_by_position=_by_position(runs),
        accepted_from=_by_source(runs, tokens),
        mean_acceptance_length=tokens / rounds if rounds else None,
        prompt_tokens=statistics.median(run.prompt_tokens for run in runs),
        first_token_seconds=_median(run.first_token_seconds for run in runs),
        prompt_tokens_per_second=_median(run.prompt_tokens / run.first_token_seconds for run in runs if run.first_token_seconds),
        token_p50_seconds=latencies.percentile(50),
        token_p95_seconds=latencies.percentile(95),
        phase_seconds_per_token=_phases(runs, tokens),
        equal=sum(a == b for a, b in outputs),
        compared=len(outputs),
    )


def _typical_speed(runs: Sequence[Run]) -> float:
    """Returns the median over the repeats of tokens per second, where each repeat is the sum of all its prompts."""
    repeats: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        repeats[run.repeat].append(run)
    return statistics.median(sum(r.tokens for r in group) / sum(r.seconds for r in group) for group in repeats.values())


def _by_position(runs: Sequence[Run]) -> tuple[float, ...]:
    """Returns, for each draft position, the share of the rounds with a draft there that accepted it."""
    longest = max((len(run.drafted_at) for run in runs), default=0)
    drafted, accepted = [0] * longest, [0] * longest
    for run in runs:
        for i, (d, a) in enumerate(zip(run.drafted_at, run.accepted_at, strict=True)):
            drafted[i] += d
            accepted[i] += a
    return tuple(a / d for a, d in zip(accepted, drafted, strict=True) if d)


def _by_source(runs: Sequence[Run], tokens: int) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run.accepted_from)
    return {source: count / tokens for source, count in sorted(counts.items())}


def _phases(runs: Sequence[Run], tokens: int) -> dict[str, float] | None:
    draft, verify = _total(runs, lambda r: r.draft_seconds), _total(runs, lambda r: r.verify_seconds)
    if draft is None or verify is None:
        return None
    other = max(0.0, sum(run.seconds for run in runs) - draft - verify)
    return {"draft": draft / tokens, "verify": verify / tokens, "other": other / tokens}


def _total(runs: Sequence[Run], seconds: Callable[[Run], float | None]) -> float | None:
    values = [value for run in runs if (value := seconds(run)) is not None]
    return sum(values) if len(values) == len(runs) else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def best_fixed(groups: dict[Variant, list[Run]], side: str) -> Variant | None:
    """Returns the program's fixed length with the highest speed-up over plain decoding, as a geometric mean over the domains."""
    baseline = next((runs for variant, runs in groups.items() if _is_baseline(variant)), [])
    ratios = {v: ratio(paired_logs(runs, baseline)) for v, runs in groups.items() if v.side == side and v.policy == FIXED}
    return max((v for v, r in ratios.items() if r), key=lambda v: ratios[v].value, default=None)  # type: ignore[union-attr]


def _against(runs: Sequence[Run]) -> tuple[Against, ...]:
    """Compares edge-mtp with each peer. On either side: plain decoding, policies or the default, and the best fixed length."""
    groups = _grouped(runs)
    sides = {variant.side for variant in groups}
    rows = []
    best = {side: best_fixed(groups, side) for side in sides} if sides - {OURS} else {}
    for side in sorted(sides - {OURS}):
        peers = [v for v in groups if v.side == side and v.policy != FIXED]
        for ours in [v for v in groups if v.side == OURS and (v.policy != FIXED or v == best[OURS])]:
            for peer in [*peers, *filter(None, [best[side]])]:
                over = ratio(paired_logs(groups[ours], groups[peer]))
                if over is not None:
                    rows.append(Against(ours=ours, peer=peer, ratio=over))
    return tuple(rows)


def _levels(measured: Sequence[Concurrency], memory: Sequence[Memory]) -> tuple[Level, ...]:
    groups: dict[tuple[Variant, int], list[Concurrency]] = defaultdict(list)
    for level in measured:
        groups[level.variant, level.clients].append(level)
    peaks = {(m.drafter, m.sequences): m.peak_bytes for m in memory}
    levels = []
    for (variant, clients), group in groups.items():
        tokens, requests = Latencies(), Latencies()
        for run in group:
            for seconds in run.token_seconds:
                tokens.add(seconds)
            for seconds in run.request_seconds:
                requests.add(seconds)
        drafter = variant.drafter if variant.policy != PLAIN else None
        levels.append(
            Level(
                variant=variant,
                clients=clients,
                tokens_per_second=statistics.median(run.tokens / run.seconds for run in group),
                token_p50_seconds=tokens.percentile(50),
                token_p95_seconds=tokens.percentile(95),
                request_p50_seconds=requests.percentile(50),
                request_p95_seconds=requests.percentile(95),
                peak_bytes=next((peak for (kind, n), peak in peaks.items() if n == clients and drafter in (None, kind)), None),
                equal=sum(run.equal for run in group),
                compared=sum(run.compared for run in group),
            )
        )
    return tuple(levels)


def _images(measured: Sequence[ImageCost]) -> tuple[ImageRow, ...]:
    groups: dict[int, list[ImageCost]] = defaultdict(list)
    for cost in measured:
        groups[cost.budget].append(cost)
    return tuple(
        ImageRow(
            budget=budget,
            rows=group[0].rows,
            encode_seconds=statistics.median(cost.encode_seconds for cost in group),
            prefill_seconds=statistics.median(cost.prefill_seconds for cost in group),
        )
        for budget, group in sorted(groups.items())
    )
