"""Which backend runs a bundle of both formats faster on this machine: measured on first use, then cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from edge_devices.files.user_cache import entry_key
from edge_devices.machine.facts import cpu_identity, installed_version
from edge_devices.waiting import Report
from edge_runtime.backends.kernels.loader import variant
from edge_runtime.backends.selection import BACKENDS, CARDS, BackendKind
from edge_runtime.calibration.measured import MeasuredValue
from edge_runtime.errors import EdgeRuntimeError

_LIBRARIES = ("llama-cpp-python", "onnxruntime")


@dataclass(frozen=True, kw_only=True)
class BackendRates:
    """Tokens per second, or per joule, to be expected of each backend with the policy's best rounds. `bundle` is its folder's name."""

    bundle: str
    rates: Mapping[BackendKind, float]

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be rates of backends."""
        if not self.rates or not set(self.rates) <= set(BACKENDS) or not all(rate > 0 for rate in self.rates.values()):
            raise ValueError(f"{self.rates!r} are not rates of backends")

    @property
    def fastest(self) -> BackendKind:
        """The backend of the highest rate."""
        return max(self.rates, key=self.rates.__getitem__)

    def sentence(self) -> str:
        """What was found, for people."""
        best = self.fastest
        others = [
            f"{self.rates[best] / rate:.2f} times the speed of {CARDS[kind].title}" for kind, rate in self.rates.items() if kind != best
        ]
        return f"{CARDS[best].title}, {', '.join(others)}" if others else f"{CARDS[best].title}, the only one that opens it"


_RATES = MeasuredValue(kind="backends", value_class=BackendRates, doing="measuring which backend is faster", times=1)


def measured_rates(
    bundle: str,
    facts: Sequence[object],
    kinds: Sequence[BackendKind],
    rate_of: Callable[[BackendKind], float],
    notify: Callable[[str], None],
) -> BackendRates:
    """Returns the cached rates of the bundle with these facts on this machine; without any, measures each of `kinds` by `rate_of`.

    A backend that cannot open the bundle has no rate. Raises its error if that is so of all.
    """

    def measure(_: Report, __: object) -> BackendRates:
        notify("First use of this bundle on this machine: measuring which of its backends is faster.")
        rates: dict[BackendKind, float] = {}
        failure: EdgeRuntimeError | None = None
        for kind in kinds:
            try:
                rates[kind] = rate_of(kind)
            except EdgeRuntimeError as error:
                failure = failure or error
                notify(f"{CARDS[kind].title} is left out: {error}.")
        if failure is not None and not rates:
            raise failure
        measured = BackendRates(bundle=bundle, rates=rates)
        notify(f"Backend: {measured.sentence()}; --backend takes the other one.")
        return measured

    libraries = (installed_version(name) or "" for name in _LIBRARIES)
    key = entry_key([cpu_identity(), variant(), *libraries, *map(str, facts)])
    return _RATES.known_or_measured(key, measure, notify, fits=lambda known: set(known.rates) <= set(kinds))


def cached_choices() -> Iterator[BackendRates]:
    """Returns what was measured on this machine, or on another one with the same cache folder."""
    return (rates for _, rates in _RATES.kept())
