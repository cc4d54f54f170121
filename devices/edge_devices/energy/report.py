"""Computes figures from a run log: joules per token with intervals, gross and above idle, and ratios of pairs."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from statistics import fmean
from typing import Any

from edge_devices.energy.intervals import Interval, combined, mean_interval, of_error, of_model, ratio_interval, widened
from edge_devices.energy.recorder import SLEPT, WINDOW_REFRESHES, Characteristics
from edge_devices.energy.run_log import LoggedRun, RunLog
from edge_devices.energy.windows import (
    MIN_UPDATES,
    NO_DECODING,
    PREFILL,
    PhaseShares,
    PhaseWatts,
    WindowEnergy,
    change_within,
    measure_window,
    share_out,
)
from edge_devices.errors import MeasurementError, printable
from edge_devices.files.typed_json import finite_json
from edge_devices.machine.state import disturbances
from edge_devices.meters.base import REPLAYED, Finding, Kind, MeterFacts, MeterState, Scope, scope_words
from edge_devices.meters.search import NO_METER

CALIBRATION = "calibrate:"  # prefix of variants that run a single phase
WARMING = 1.0  # standard error of a phase's power / its change within the phase's loops, chosen in simulations
MIN_SIGNAL = 3.0  # energy above idle of fewer standard errors is not distinguishable from zero


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Mean idle power before and after the runs. `error` includes the drift between the two, unless there was only one window."""

    watts: float
    error: float
    freedom: float
    drift_watts: float
    windows: int = 2


@dataclass(frozen=True, kw_only=True)
class VariantEnergy:
    """The energy of one variant.

    Joules are gross unless they are named net. None means unknown, or not distinguishable from noise. `refused` says why repeats were
    excluded. `prompt_tokens` is the mean per request. `phase_joules` are joules per request by phase, found by `phase_method`. `closure` is
    (sum of calibrated phases - measured) / measured of the worst repeat; None if it was not tested.
    """

    name: str
    n: int
    refused: list[str]
    joules_per_output_token: Interval | None = None
    net_joules_per_output_token: Interval | None = None
    prompt_tokens: float | None = None
    joules_per_prompt_token: Interval | None = None
    joules_per_request: Interval | None = None
    watts: Interval | None = None
    tokens_per_second: float | None = None
    phase_method: str = "measured"
    phase_joules: dict[str, Interval] = field(default_factory=dict)
    closure: float | None = None
    closes: bool = True
    ratio_to_baseline: Interval | None = None
    saves_energy: bool | None = None


@dataclass(frozen=True, kw_only=True)
class EnergyReport:
    """All figures of one measurement, and its meter. `phase_watts` is the mean power of the phases that have calibration loops."""

    meter: str
    scope: str
    estimate: bool
    refresh_s: float
    systematic: str
    idle: Idle | None
    variants: list[VariantEnergy]
    warnings: list[str] = field(default_factory=list)
    phase_watts: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys. Infinite values are null, such as the degrees of freedom of a known error."""
        record: dict[str, Any] = finite_json(self)
        return record


@dataclass(frozen=True, kw_only=True)
class ValidRun:
    """A run that was not excluded, with its window and its energy by phase."""

    run: LoggedRun
    window: WindowEnergy
    shares: PhaseShares

    @property
    def decode_joules(self) -> float:
        """Joules of the phases of decoding; those of the whole window if the run has no phases."""
        return sum(self.shares.joules[phase] for phase in self.decoding) if self.run.phases else self.window.joules

    @property
    def decode_s(self) -> float:
        """Seconds of the phases of decoding."""
        return sum(s for phase, s in self.run.phases.items() if phase not in NO_DECODING) or self.run.seconds

    @property
    def decoding(self) -> set[str]:
        """The phases whose joules are divided by emitted tokens."""
        return self.shares.joules.keys() - NO_DECODING

    @property
    def middle_s(self) -> float:
        return (self.run.start_s + self.run.end_s) / 2


def make_report(log: RunLog, *, baseline: str | None = None) -> EnergyReport:
    """Computes the report. Raises MeasurementError if all runs are excluded, or if the external meter's table is missing."""
    if not log.trace.times:
        raise MeasurementError("the log holds no readings because its meter is external; give that meter's table with --external TABLE")
    powers, idle = _phase_powers(log), _idle(log)
    counted: dict[str, list[ValidRun]] = {}
    refused: dict[str, list[str]] = {}
    for run in log.runs:
        if run.variant.startswith(CALIBRATION):
            continue
        counted.setdefault(run.variant, [])
        entry, reasons = _count(log, run, powers, idle)
        if entry is None:
            refused.setdefault(run.variant, []).append(f"repeat {run.repeat}: {'; '.join(reasons)}")
        else:
            counted[run.variant].append(entry)
    if not any(counted.values()):
        first = next((r[0] for r in refused.values()), "the log holds no runs")
        raise MeasurementError(f"no run counts: {first}")
    if baseline is not None and baseline not in counted:
        raise MeasurementError(f"the log has no variant {baseline!r} to compare with; it has {', '.join(counted)}")
    base = counted[baseline] if baseline else None
    variants = [_variant(name, runs, refused.get(name, []), idle, base if name != baseline else None) for name, runs in counted.items()]
    if log.facts.model_error:
        variants = [_modelled(variant, log.facts.model_error) for variant in variants]
    return EnergyReport(
        meter=log.facts.name,
        scope=log.facts.scope,
        estimate=log.facts.is_estimate,
        refresh_s=log.characteristics.refresh_s,
        systematic=log.facts.systematic,
        idle=idle,
        variants=variants,
        warnings=[*log.warnings, *_idle_warnings(idle)],
        phase_watts={phase: power.watts for phase, power in powers.items()},
    )


def _modelled(variant: VariantEnergy, model_error: float) -> VariantEnergy:
    """Returns a variant whose intervals include the error range of the power model."""

    widened_figures: dict[str, Any] = {
        each.name: of_model(figure, model_error) for each in fields(variant) if isinstance(figure := getattr(variant, each.name), Interval)
    }
    ratio = widened_figures.get("ratio_to_baseline")
    return replace(
        variant,
        **widened_figures,
        phase_joules={phase: of_model(joules, model_error) for phase, joules in variant.phase_joules.items()},
        saves_energy=ratio.high < 1 if ratio else None,
    )


def exclusion_reasons(log: RunLog, run: LoggedRun) -> list[str]:
    """Returns the reasons why a run is excluded; an empty list if it is not."""
    return _count(log, run, {})[1]


def _count(log: RunLog, run: LoggedRun, powers: Mapping[str, PhaseWatts], idle: Idle | None = None) -> tuple[ValidRun | None, list[str]]:
    try:
        window = measure_window(log.trace, run.start_s, run.end_s, log.characteristics, run.lead_s)
    except MeasurementError as error:
        return None, [str(error)]
    reasons = exclusions(log, run, window)
    if reasons:
        return None, reasons
    shares = share_out(
        window.joules,
        run.phases,
        powers,
        error_joules=window.error_watts * window.seconds,
        window_s=window.seconds,
        idle_watts=idle.watts if idle else 0.0,
    )
    return ValidRun(run=run, window=window, shares=shares), []


def _phase_powers(log: RunLog) -> dict[str, PhaseWatts]:
    """Returns the mean power of each phase that has calibration runs."""
    windows: dict[str, list[WindowEnergy]] = {}
    for run in log.runs:
        if run.variant.startswith(CALIBRATION):
            entry, _ = _count(log, run, {})
            if entry:
                windows.setdefault(run.variant.removeprefix(CALIBRATION), []).append(entry.window)
    powers = {}
    for phase, loops in windows.items():
        if len(loops) >= 2:
            mean = mean_interval([w.watts for w in loops], [w.start_s for w in loops], resolution=fmean(w.resolution_watts for w in loops))
            error, freedom = combined(
                [(mean.error, mean.freedom), (WARMING * change_within(log.trace, loops, log.characteristics), math.inf)]
            )
            powers[phase] = PhaseWatts(watts=mean.value, error=error, freedom=freedom)
        else:
            powers[phase] = PhaseWatts(watts=loops[0].watts, error=loops[0].error_watts, freedom=loops[0].freedom)
    return powers


def _idle(log: RunLog) -> Idle | None:
    windows = []
    for start_s, end_s in log.idles:
        if any(start_s <= time_s <= end_s and reason.startswith(SLEPT) for time_s, reason in log.faults):
            continue
        with contextlib.suppress(MeasurementError):  # e.g. if a charger was plugged in before the last window
            windows.append(measure_window(log.trace, start_s, end_s, log.characteristics))
    if not windows:
        return None
    drift = windows[-1].watts - windows[0].watts
    # Between the two windows, idle power may have had any value between theirs, so the error is that of a uniform distribution.
    parts = [(w.error_watts / len(windows), w.freedom) for w in windows]
    error, freedom = combined([*parts, (abs(drift) / 12**0.5, float("inf"))])
    return Idle(watts=fmean(w.watts for w in windows), error=error, freedom=freedom, drift_watts=drift, windows=len(windows))


def _idle_warnings(idle: Idle | None) -> list[str]:
    if idle is None:
        return ["idle power was not measured: no figure is above idle"]
    return ["idle power was measured once: its drift is not in the intervals above idle"] if idle.windows < 2 else []


def _variant(
    name: str, runs: Sequence[ValidRun], refused: list[str], idle: Idle | None, baseline: Sequence[ValidRun] | None
) -> VariantEnergy:
    if not runs:
        return VariantEnergy(name=name, n=0, refused=refused)
    ratio = _ratio(runs, baseline) if baseline is not None else None
    return VariantEnergy(
        name=name,
        n=len(runs),
        refused=refused,
        joules_per_output_token=_per_of(runs, runs[0].decoding, lambda r: r.decode_joules, lambda r: r.run.emitted_tokens),
        net_joules_per_output_token=_net(runs, idle) if idle else None,
        prompt_tokens=_prompt_tokens(runs),
        joules_per_prompt_token=_per_of(
            runs,
            {PREFILL},
            lambda r: r.shares.joules.get(PREFILL, 0.0),
            lambda r: r.run.prompt_tokens if PREFILL in r.run.phases else 0,
        ),
        joules_per_request=_per(runs, lambda r: r.window.joules, lambda r: r.run.requests),
        watts=_per(runs, lambda r: r.window.watts, lambda _: 1),
        tokens_per_second=sum(r.run.emitted_tokens for r in runs) / sum(r.decode_s for r in runs),
        phase_method=runs[0].shares.method,
        phase_joules=_by_phase(runs),
        closes=all(r.shares.closes for r in runs),
        closure=max((r.shares.closure for r in runs if r.shares.closure is not None), key=abs, default=None),
        ratio_to_baseline=ratio,
        saves_energy=ratio.high < 1 if ratio else None,
    )


def _prompt_tokens(runs: Sequence[ValidRun]) -> float | None:
    """Returns the mean number of prompt tokens per request; None if prompts were not counted."""
    tokens, requests = sum(r.run.prompt_tokens for r in runs), sum(r.run.requests for r in runs)
    return tokens / requests if tokens and requests else None


def _per(runs: Sequence[ValidRun], joules: Callable[[ValidRun], float], count: Callable[[ValidRun], int]) -> Interval | None:
    """Returns joules per unit as the mean of the repeats. For a single run, the error is that of its window."""
    if any(count(r) <= 0 for r in runs):
        return None
    values = [joules(r) / count(r) for r in runs]
    resolution = fmean(r.window.resolution_watts / r.window.watts * v if r.window.watts else 0.0 for r, v in zip(runs, values, strict=True))
    if len(runs) > 1:
        return mean_interval(values, [r.middle_s for r in runs], resolution=resolution)
    window = runs[0].window
    relative = max(window.error_watts, window.resolution_watts) / window.watts if window.watts else 0.0
    return of_error(values[0], values[0] * relative, window.freedom, 1)


def _per_of(
    runs: Sequence[ValidRun], phases: Collection[str], joules: Callable[[ValidRun], float], count: Callable[[ValidRun], int]
) -> Interval | None:
    """Returns joules of some phases per unit, with the errors of the phases' shares, which are the same in all repeats."""
    inner = _per(runs, joules, count)
    return widened(inner, [(inner.value * error, freedom) for error, freedom in _share_errors(runs, phases)]) if inner else None


def _share_errors(
    runs: Sequence[ValidRun], phases: Collection[str], others: Sequence[ValidRun] = (), their_phases: Collection[str] = ()
) -> list[tuple[float, float]]:
    """Returns the relative errors, with degrees of freedom, that the joules of `phases` have from errors of the phases' powers.

    With `others`, they are errors of the ratio to the others' joules of `their_phases`. Calibration loops do not do exactly what requests
    do, so the mean closure is counted as an error of each power too.
    """
    known: dict[str, tuple[float, float]] = {}
    for run in (*runs, *others):
        known.update(run.shares.errors)
    closures = [r.shares.closure or 0.0 for r in (*runs, *others)]
    misfit = abs(fmean(closures))
    errors = []
    for phase, (error, freedom) in known.items():
        weight = fmean(r.shares.sensitivity(phases).get(phase, 0.0) for r in runs)
        weight -= fmean(r.shares.sensitivity(their_phases).get(phase, 0.0) for r in others) if others else 0.0
        errors += [(abs(weight) * error, freedom), (abs(weight) * misfit, math.inf)]
    return errors


def _by_phase(runs: Sequence[ValidRun]) -> dict[str, Interval]:
    by_phase = {}
    for phase in dict.fromkeys(p for r in runs for p in r.shares.joules):
        joules = _per_of(runs, {phase}, lambda r, phase=phase: r.shares.joules.get(phase, 0.0), lambda r: r.run.requests)  # type: ignore[misc]
        if joules is not None:
            by_phase[phase] = joules
    return by_phase


def _net(runs: Sequence[ValidRun], idle: Idle) -> Interval | None:
    """Returns joules above idle per emitted token: idle power × decode time is subtracted. None if that is less than MIN_SIGNAL errors."""
    inner = _per(runs, lambda r: r.decode_joules - idle.watts * r.decode_s, lambda r: r.run.emitted_tokens)
    if inner is None:
        return None
    tokens = sum(r.run.emitted_tokens for r in runs)
    gross = sum(r.decode_joules for r in runs) / tokens
    shared = [(gross * error, freedom) for error, freedom in _share_errors(runs, runs[0].decoding)]
    net = widened(inner, [(sum(r.decode_s for r in runs) / tokens * idle.error, idle.freedom), *shared])
    return net if net.value >= MIN_SIGNAL * net.error else None


def _ratio(runs: Sequence[ValidRun], baseline: Sequence[ValidRun]) -> Interval | None:
    """Returns this variant's joules per token / the baseline's, from the repeats that neither excludes."""
    theirs = {r.run.repeat: r for r in baseline}
    pairs = [
        (r, theirs[r.run.repeat])
        for r in runs
        if r.run.repeat in theirs and r.run.emitted_tokens and theirs[r.run.repeat].run.emitted_tokens
    ]
    if len(pairs) < 2:
        return None
    ours, base = ([pair[side] for pair in pairs] for side in (0, 1))
    values, baselines = ([r.decode_joules / r.run.emitted_tokens for r in column] for column in (ours, base))
    return ratio_interval(values, baselines, _share_errors(ours, ours[0].decoding, base, base[0].decoding))


LONGEST_OVERRUN = 1.25
MAX_MISSING = 0.5  # share of a window without readings; it widens the interval of the figure
# For these samplers, a failed reading means only that a command or file did not answer. A battery's may mean that a charger was plugged in,
# whose joules are missing.
LOST_READINGS = frozenset((Scope.RAILS, Scope.BOARD, Scope.MODULE, Scope.EXTERNAL, Scope.PACKAGE, Scope.PLATFORM))


def too_short(log: RunLog, seconds: float, lead_s: float) -> str | None:
    """Returns why a window of this length is too short for the meter, or None. The same work ran for `lead_s` before the window."""
    need = log.characteristics.shortest_measured_s + max(0.0, log.characteristics.lead_in_s - lead_s)
    if seconds >= need:
        return None
    refresh = f"{WINDOW_REFRESHES} refreshes of {log.characteristics.refresh_s:.3g} s"
    return f"too short: {seconds:.3g} s, and {log.facts.name} needs {need:.3g} s ({refresh}, at least 10 s, and its lag)"


def exclusions(log: RunLog, run: LoggedRun, window: WindowEnergy) -> list[str]:
    """Returns the reasons to exclude a run, which follow from its state, length and readings."""
    reasons = disturbances(run.before, run.after)
    short = too_short(log, window.seconds, run.lead_s)
    if short:
        reasons.append(short)
    if run.expected_s and run.seconds > LONGEST_OVERRUN * run.expected_s:
        reasons.append(
            f"took {run.seconds:.3g} s where {run.expected_s:.3g} s were expected: something else ran, or the process was suspended"
        )
    sampler = log.facts.kind is Kind.SAMPLER
    first = bisect_left(log.faults, run.start_s, key=lambda fault: fault[0])  # faults are sorted by time
    within = [reason for time_s, reason in islice(log.faults, first, None) if time_s <= run.end_s]
    if slept := next((reason for reason in within if reason.startswith(SLEPT)), None):
        reasons.append(slept)
    elif within and not (sampler and log.facts.scope in LOST_READINGS):
        reasons.append(f"the meter failed: {within[0]}")
    if sampler and window.updates < MIN_UPDATES:
        reasons.append(f"the meter showed {window.updates} new values; {MIN_UPDATES} are needed")
    if window.missing_s > MAX_MISSING * window.seconds:
        lost = f"the meter showed no update for {window.missing_s:.3g} s of {window.seconds:.3g}, {window.longest_gap_s:.3g} s at a time"
        reasons.append(f"{lost}; at most {MAX_MISSING:.0%} may be missing")
    return reasons


# If the ends of a ratio's interval differ by more than this factor, the ratio is not determined.
WIDEST_RATIO = 4.0


def meter_lines(findings: Sequence[Finding], measured: Mapping[str, Characteristics | str] | None = None) -> list[str]:
    """Returns the lines of `edge-devices meters`: first usable meters, then present ones with reason and remedy, then absent ones.

    `measured` holds the characteristics of the usable ones, or the reason why they are unknown.
    """
    lines = []
    for facts in (finding.meter.facts for finding in findings if finding.meter):
        unit = "J" if facts.kind == "counter" else "W"
        expected = f"new about every {facts.refresh_s:g} s" + (f", a load shows after {facts.lag_s:g} s" if facts.lag_s else "")
        lines.append(f"usable   {facts.name}: {facts.kind}, scope {facts.scope}, {expected}, {facts.resolution:g} {unit} steps")
        lines += [f"           {note}" for note in (*([f"needs {facts.needs}"] if facts.needs else []), *facts.notes)]
        figures = (measured or {}).get(facts.name)
        if figures is not None:
            lines.append(f"           {figures if isinstance(figures, str) else _measured(figures)}")
    for finding in (f for f in findings if f.state is MeterState.PRESENT):
        lines.append(f"present  {finding.name}: {finding.reason}")
        if finding.remedy:
            lines.append(f"           {finding.remedy}")
    lines += [f"absent   {f.name}: {f.reason}" for f in findings if f.state is MeterState.ABSENT]
    if not any(f.meter for f in findings):
        denied = [f.name for f in findings if f.state is MeterState.PRESENT]
        lines.insert(0, f"{NO_METER} can be used now" + (f"; what stands in the way of {', '.join(denied)} is below" if denied else ""))
        lines.append("a meter in the supply line that writes a table is enough: edge-bench run BUNDLE --energy LOG --meter external")
    return list(map(printable, lines))


def _measured(figures: Characteristics) -> str:
    return (
        f"measured: new every {figures.refresh_s:.3g} s (at most {figures.longest_gap_s:.3g} s), a load shows after {figures.lag_s:.3g} s,"
        f" {figures.zero_rate:.0%} of readings were invalid, a reading takes {1000 * figures.read_s:.2g} ms"
    )


def head_lines(report: EnergyReport) -> list[str]:
    """Returns lines about the meter with its scope, and about the idle power."""
    mark = _ESTIMATED if report.estimate else _REPLAYED if report.meter.startswith(REPLAYED) else ""
    lines = [
        f"{mark}meter {report.meter}, scope {scope_words(report.scope)}, new every {report.refresh_s:.3g} s;"
        f" not in the intervals: {report.systematic}"
    ]
    if report.idle:
        lines.append(f"idle {report.idle.watts:.3g} W ± {2 * report.idle.error:.1g}, drift {report.idle.drift_watts:+.2g} W")
    return list(map(printable, lines))


_ESTIMATED, _REPLAYED = "ESTIMATE, nothing was measured: ", "REPLAYED from a recording of another run: "


def origin_label(facts: MeterFacts) -> str:
    """Returns the label for a figure that was not measured in its run; empty for one that was measured."""
    return _ESTIMATED if facts.is_estimate else _REPLAYED if facts.is_replay else ""


def ratio_text(ratio: Interval) -> str:
    """Returns a ratio with its interval as text; "not determined" if the interval is too wide."""
    too_wide = ratio.half < float("inf") and ratio.high > WIDEST_RATIO * max(ratio.low, 0.0)
    return f"not determined (n={ratio.n}, the runs differ too much):" if too_wide else figure_text(ratio)


def figure_text(interval: Interval, *, basis: str = "") -> str:
    """Returns a figure with the digits that its interval supports (two of the half width). `basis` replaces the words about repeats."""
    if not 0 < interval.half < float("inf"):
        return f"{interval.value:.3g} (n={interval.n}, no interval)"
    digits = max(0, 1 - math.floor(math.log10(interval.half)))
    basis = basis or (f"n={interval.n}" if interval.n > 1 else "n=1: the reading's error alone, not how runs differ")
    return f"{interval.value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}] ({basis})"
