"""When a run's figures do not count, and why."""

from __future__ import annotations

from edge_devices.energy.run_log import Run, RunLog
from edge_devices.energy.windows import LEAST_NEWS, WindowEnergy
from edge_devices.machine.state import disturbances
from edge_devices.meters.base import Kind

LONGEST_OVERRUN = 1.25
LONGEST_GAP = 3  # refreshes, or readings where those are rarer


def too_short(log: RunLog, seconds: float) -> str | None:
    """Returns why a window of this length gives no figure with this meter, or None."""
    need = log.characteristics.shortest_window_s
    if seconds >= need:
        return None
    return f"too short: {seconds:.3g} s, and {log.facts.name} needs {need:.3g} s (50 refreshes of {log.characteristics.refresh_s:.3g} s, at least 10 s, and its lag)"


def objections(log: RunLog, run: Run, window: WindowEnergy) -> list[str]:
    """Returns every reason against a run; none: it counts."""
    found = disturbances(run.before, run.after)
    short = too_short(log, window.seconds)
    if short:
        found.append(short)
    if run.expected_s and run.seconds > LONGEST_OVERRUN * run.expected_s:
        found.append(
            f"took {run.seconds:.3g} s where {run.expected_s:.3g} s were expected: something else ran, or the process was put aside"
        )
    failed = [reason for time_s, reason in log.faults if run.start_s <= time_s <= run.end_s]
    if failed:
        found.append(f"the meter failed: {failed[0]}")
    if log.facts.kind is Kind.SAMPLER:
        found += _sampler_objections(log, window)
    return found


def _sampler_objections(log: RunLog, window: WindowEnergy) -> list[str]:
    found = []
    if window.news < LEAST_NEWS:
        found.append(f"the meter showed {window.news} new values; {LEAST_NEWS} are needed")
    # What the meter did while nothing was wrong is its nature, not a fault of this run.
    longest = max(LONGEST_GAP * log.characteristics.refresh_s, LONGEST_GAP * log.facts.poll_s, 1.5 * log.characteristics.longest_gap_s)
    if window.longest_gap_s > longest:
        found.append(f"the meter was silent for {window.longest_gap_s:.3g} s, longer than {longest:.3g} s")
    return found
