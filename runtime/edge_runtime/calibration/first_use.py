"""What is measured at a pair's first use on a machine and then remembered: its costs, and the threads its phases run best on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from edge_devices.files.user_cache import cache_folder, cache_put, read_entries
from edge_devices.machine.cpu_affinity import keep_to_fastest, processor_groups
from edge_devices.machine.facts import cpu_identity
from edge_runtime.calibration.cost_probe import CACHE_NAME, cache_costs, cached_costs, measure_costs
from edge_runtime.calibration.thread_probe import CACHE_NAME as THREADS_NAME
from edge_runtime.calibration.thread_probe import ThreadCounts, ThreadTimes, candidates, measure_threads
from edge_runtime.drafting.cost_model import CostCurve, Costs
from edge_runtime.drafting.phase_power import EnergyCosts, PhasePower
from edge_runtime.interfaces import Drafter, Target

# A machine that was busy when costs were measured must not be believed for ever, so the first uses all measure.
TIMES = 3
# Returns the watts of each phase, measured on an opened pair or remembered under a key; leaves the cache empty. It gets the pair, a token to
# fill texts with, the most rows of a verify, and the key.
PowerSource = Callable[[Target, Drafter | None, int, int, str], PhasePower]


@dataclass(frozen=True, kw_only=True)
class MeasuredPair:
    """An opened pair, a token to fill texts with, the most rows of a verify, and `facts`, all that its speed depends on."""

    target: Target
    drafter: Drafter | None
    token: int
    rows: int
    objective: str
    facts: tuple[object, ...]

    @property
    def key(self) -> str:
        """What it is remembered by."""
        return hashlib.sha256(json.dumps([cpu_identity(), self.rows, [*map(str, self.facts)]]).encode()).hexdigest()


def measured_costs(pair: MeasuredPair, power: PhasePower | PowerSource | None) -> Costs:
    """Returns the remembered costs of this pair on this machine, or measures them, which takes about two seconds the first TIMES times.

    Seconds, or joules if the objective is energy; a power that has to be measured takes longer.

    Called before a request's prompt is in the cache: measuring empties it.
    """
    path = cache_folder() / CACHE_NAME
    measured = cached_costs(path, pair.key)
    if measured is None or measured.times < TIMES:
        now = measure_costs(pair.target, pair.drafter, pair.token, most_rows=pair.rows)
        measured = now if measured is None else measured.combined(now)
        cache_costs(path, pair.key, measured)
    curve = CostCurve(measured)
    if pair.objective != "energy" or power is None:
        return curve
    return EnergyCosts(curve, power if isinstance(power, PhasePower) else power(pair.target, pair.drafter, pair.token, pair.rows, pair.key))


def measured_threads(pair: MeasuredPair, set_threads: Callable[[ThreadCounts], None], notify: Callable[[str], None]) -> ThreadCounts:
    """Makes the pair run on the remembered numbers of threads, or, the first TIMES times, on those that a measurement of about two
    seconds finds best.

    Where cores differ, the process keeps to the fastest from then on. Measuring empties the cache.
    """
    groups = processor_groups()
    most = sum(map(len, groups))

    def use(counts: ThreadCounts) -> None:
        keep_to_fastest(counts.most, groups)
        set_threads(counts)

    if most == 1:
        return ThreadCounts.same(1)
    path, key, tries = cache_folder() / THREADS_NAME, pair.key, candidates(groups)
    known = ThreadTimes.from_json(read_entries(path).get(key), tries)
    if known is None or known.times < TIMES:
        if known is None:
            notify("First use of this bundle on this machine: finding out how many threads each phase runs fastest on.")
        now = measure_threads(pair.target, pair.drafter, use, tries, pair.token)
        known = now if known is None else known.combined(now)
        cache_put(path, key, known.to_json())
    use(known.best())
    return known.best()
