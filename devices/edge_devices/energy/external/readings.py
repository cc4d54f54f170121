"""The figures of a meter's table: signs, readings that are missing, counters that begin again, and what no supply of a device can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, pstdev

from edge_devices.errors import MeterError

WATTS_ASSUMED = (0.05, 300.0)  # mean of a table whose columns name no unit
WATTS_STATED = (0.001, 3000.0)
RESTART_SHARE = 0.1  # a counter that falls below this share of its value began again
MANY_FALLS, FALLS_SHARE = 3, 0.02  # more often than either, the column is no counter
GLITCH_ROWS = 5  # a counter that is back after so few rows was misread
NOISE_SHARE = 0.01  # of the figures' sum that may have the other sign
MAX_MISSING_SHARE = 0.25
MAINS_VOLTS = 80.0
SAME_TIME_SHARE, UNLIKE = 0.8, 0.1  # of rows that come together, and how far the figures of their places may be apart


def plausible(watts: float, *, stated: bool) -> bool:
    """Returns whether a mean power can be that of such a device. `stated`: the table names the unit."""
    low, high = WATTS_STATED if stated else WATTS_ASSUMED
    return low <= watts <= high


def mean_watts(times: Sequence[float], values: Sequence[float], *, counter: bool) -> float:
    """Returns the mean power of a table's readings, whatever their sign; NaN where a reading is none."""
    if not counter:
        return abs(fmean(values))
    span = abs(times[-1] - times[0])
    return abs(values[-1] - values[0]) / span if span > 0 else math.nan


def used_watts(what: str, values: Sequence[float]) -> tuple[list[float], list[str]]:
    """Returns the watts with use above 0, and a note where the sign was turned. Raises MeterError where use and charge alternate."""
    used, charged = sum(v for v in values if v > 0), -sum(v for v in values if v < 0)
    if min(used, charged) > NOISE_SHARE * (used + charged):
        share = min(used, charged) / (used + charged)
        raise MeterError(
            f"{what} changes its sign ({share:.0%} of it has the other one), as that of a battery which charges and feeds in turn;"
            " measure while it feeds alone, or at the device's own input"
        )
    if charged > used:
        return [-v for v in values], [f"{what} is negative throughout and was taken with the other sign"]
    return list(values), []


def without_zeros(what: str, times: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float], list[str]]:
    """Returns times and watts without exact zeros: no device that runs takes nothing, so they are readings that failed.

    Zeros before the first and after the last figure are a device that was off. Raises MeterError where many are in between.
    """
    kept = [i for i, value in enumerate(values) if value]
    if len(kept) == len(values) or not kept:
        return list(times), list(values), []
    zeros = kept[-1] - kept[0] + 1 - len(kept)
    if zeros > MAX_MISSING_SHARE * (zeros + len(kept)):
        raise MeterError(
            f"{what} is 0 in {zeros} of {zeros + len(kept)} rows between others: readings are missing, or the power is below what the meter"
            " shows; take another column with --columns, or a finer meter"
        )
    note = [f"{what} is 0 in {zeros} rows between others: taken as readings that failed"] if zeros else []
    return [times[i] for i in kept], [values[i] for i in kept], note


def counted_joules(
    what: str, rows: Sequence[int], times: Sequence[float], values: Sequence[float]
) -> tuple[list[int], list[float], list[str]]:
    """Returns which readings of a counter count, their joules without restarts, and notes.

    Raises MeterError for a counter that goes back, that steps by more than any supply gives, or that is none.
    """
    spacing = median([b - a for a, b in pairwise(times) if b > a] or [1.0])
    kept, joules, notes = list[int](), list[float](), list[str]()
    base, at = 0.0, 0
    falls = restarts = misread = 0
    while at < len(values):
        value, last = values[at], values[kept[-1]] if kept else -math.inf
        if value < last:
            falls += 1
            back = next((j for j in range(at + 1, min(at + 1 + GLITCH_ROWS, len(values))) if values[j] >= last), None)
            if back is not None:
                misread += back - at
                at = back
                continue
            if value > RESTART_SHARE * last:
                raise MeterError(f"row {rows[at]} of {what} has less energy than the row before ({value:g} after {last:g} J)")
            base, restarts = base + last, restarts + 1
        elif kept and value - last > WATTS_STATED[1] * max(spacing, times[at] - times[kept[-1]]):
            raise MeterError(
                f"row {rows[at]} of {what} counts {value - last:.4g} J in {times[at] - times[kept[-1]]:.3g} s, more than any device takes;"
                " the counter was misread or set: cut the table there"
            )
        kept.append(at)
        joules.append(base + value)
        at += 1
    if falls > max(MANY_FALLS, FALLS_SHARE * len(values)):
        raise MeterError(f"{what} goes back {falls} times: it rather holds the energy of each row's time than a counter; export the watts")
    if restarts:
        notes.append(f"the counter began again {restarts} times and was continued")
    if misread:
        notes.append(f"{what} goes back for {misread} rows and returns: taken as readings that failed")
    return kept, joules, notes


def check_one_device(what: str, times: Sequence[float], values: Sequence[float]) -> None:
    """Raises MeterError where the rows come in groups of one time whose places have figures of their own, as those of several devices."""
    groups: list[list[float]] = []
    for at, value in enumerate(values):
        if at and times[at] == times[at - 1]:
            groups[-1].append(value)
        else:
            groups.append([value])
    size = int(median(map(len, groups)))
    alike = [group for group in groups if len(group) == size]
    if size < 2 or len(alike) < 3 or len(alike) < SAME_TIME_SHARE * len(groups):
        return
    places = list(zip(*alike, strict=True))
    means = [fmean(place) for place in places]
    scatter = max(pstdev(place) for place in places) / math.sqrt(len(alike))
    if max(means) - min(means) > max(UNLIKE * abs(fmean(means)), 4 * scatter):
        shown = ", ".join(f"{mean:.3g}" for mean in means[:4])
        raise MeterError(
            f"{size} rows have the same time each, with other figures in {what} ({shown}): they are of several devices; export one of them"
        )
