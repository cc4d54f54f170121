"""A run's log with the recording of an external meter in the place of its own samples."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from edge_devices.energy.alignment import clock_offset, shifted
from edge_devices.energy.characteristics import Characteristics, change_times
from edge_devices.energy.run_log import RunLog
from edge_devices.errors import MeasurementError
from edge_devices.meters.trace import Trace

LONGEST_EXTRA_S = 6 * 3600.0


def with_external(log: RunLog, table: Trace) -> RunLog:
    """Returns the log as the external meter saw it; its clock is found by the log's load steps, or by the runs themselves where there are none.

    Raises MeasurementError when the clocks cannot be aligned.
    """
    steps = log.loads or [(run.start_s, run.end_s) for run in log.runs]
    if not steps:
        raise MeasurementError("the log holds neither load steps nor runs to align the external meter's clock with.")
    span = table.times[-1] - table.times[0]
    if span > LONGEST_EXTRA_S:
        raise MeasurementError(f"the external recording lasts {span:.0f} s; cut it to the run, at most {LONGEST_EXTRA_S:.0f} s.")
    # The first step lies somewhere inside the recording.
    search = (steps[0][0] - table.times[-1], steps[0][0] - table.times[0])
    trace = shifted(table, clock_offset(table, steps, search=search))
    changes = change_times(trace)
    gaps = sorted(b - a for a, b in pairwise(changes))
    refresh_s = gaps[len(gaps) // 2] if gaps else table.facts.refresh_s
    seen = Characteristics(refresh_s=max(refresh_s, 1e-6), longest_gap_s=max(gaps, default=refresh_s), lag_s=0.0, zero_rate=0.0, read_s=0.0)
    return replace(log, facts=trace.facts, trace=trace, characteristics=seen, faults=[])
