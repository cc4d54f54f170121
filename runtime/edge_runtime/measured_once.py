"""What is measured at a pair's first use on a machine and then remembered: its costs, and the threads its phases run best on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from edge_runtime.backends.base import Drafter, Target
from edge_runtime.cost_curve import CostCurve, Costs
from edge_runtime.cost_probe import CACHE_NAME, measure_costs, remember_costs, remembered_costs
from edge_runtime.machine_cache import cache_folder, cpu_identity, read_entries, remember_entry
from edge_runtime.phase_power import EnergyCosts, PhasePower
from edge_runtime.processors import keep_to_fastest, processor_groups
from edge_runtime.thread_probe import CACHE_NAME as THREADS_NAME
from edge_runtime.thread_probe import ThreadCounts, candidates, measure_threads

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
    """Returns the remembered costs of this pair on this machine, or measures them, which takes about two seconds the first time.

    Seconds, or joules if the objective is energy; a power that has to be measured takes longer.

    Called before a request's prompt is in the cache: measuring empties it.
    """
    path = cache_folder() / CACHE_NAME
    measured = remembered_costs(path, pair.key)
    if measured is None:
        measured = measure_costs(pair.target, pair.drafter, pair.token, most_rows=pair.rows)
        remember_costs(path, pair.key, measured)
    curve = CostCurve(measured)
    if pair.objective != "energy" or power is None:
        return curve
    return EnergyCosts(curve, power if isinstance(power, PhasePower) else power(pair.target, pair.drafter, pair.token, pair.rows, pair.key))


def measured_threads(pair: MeasuredPair, set_threads: Callable[[ThreadCounts], None], notify: Callable[[str], None]) -> ThreadCounts:
    """Makes the pair run on the remembered numbers of threads, or on those that a measurement of about two seconds finds best.

    Where cores differ, the process keeps to the fastest from then on. Measuring empties the cache.
    """
    groups = processor_groups()
    most = sum(map(len, groups))

    def use(counts: ThreadCounts) -> None:
        keep_to_fastest(counts.most, groups)
        set_threads(counts)

    if most == 1:
        return ThreadCounts.same(1)
    path, key = cache_folder() / THREADS_NAME, pair.key
    counts = ThreadCounts.from_json(read_entries(path).get(key), most)
    if counts is not None:
        use(counts)
        return counts
    notify("First use of this bundle on this machine: finding out how many threads each phase runs fastest on.")
    counts = measure_threads(pair.target, pair.drafter, use, candidates(groups), pair.token)
    remember_entry(path, key, counts.to_json())
    return counts
