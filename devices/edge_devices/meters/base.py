"""The interface of all meters (facts, readings, findings, sources), and helpers that several meters use."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, Protocol

from edge_devices.errors import MeasurementError, MeterError
from edge_devices.machine.system import System

REPLAYED = "replay:"  # the beginning of the name of a meter that replays a recording


class Scope(StrEnum):
    """Which parts of a machine a figure covers. Figures of different scopes are never added, ranked or put in one column."""

    PACKAGE = "package"  # the processor package: cores, integrated graphics, caches
    DRAM = "dram"  # the memory, if it has its own counter
    PLATFORM = "platform"  # psys: the package and whatever else the board's maker connected
    RAILS = "rails"  # the sum of supply rails after the battery
    BOARD = "board_sensed"  # the sum of the rails of a single-board computer's supply chip, not its input
    MODULE = "module_in"  # the input of a compute module, or the rail in which a sensor sits
    DEVICE = "device_battery"  # the whole device, display and radios included
    GPU = "gpu_board"  # one graphics board with its memory
    EXTERNAL = "external_dc"  # a meter in the supply line
    ESTIMATE = "estimate"  # no measurement: a power model


def scope_words(scope: str) -> str:
    """Returns a scope in words for readers of figures. For a GPU it says that the rest of the machine is not included."""
    return f"{scope} (the GPU's board, not the whole machine)" if scope == Scope.GPU else str(scope)


class Kind(StrEnum):
    """A counter returns cumulative joules. A sampler returns watts, which must be integrated."""

    COUNTER = "counter"
    SAMPLER = "sampler"


class Sample(NamedTuple):
    """One reading: the time on the system's clock, joules since an arbitrary start (counter) or watts (sampler), and the raw text."""

    time_s: float
    value: float
    raw: str = ""


@dataclass(frozen=True, kw_only=True)
class MeterFacts:
    """The properties of a meter that are known before it is characterised.

    `refresh_s` is the expected time between new values, and `lag_s` the time until a load shows. `resolution` is in joules or watts.
    `poll_s` is the time between reads, at least the cost of a read. `needs` is what the user must provide. `systematic` names errors that
    repetition does not remove. `model_error` is the relative error of a power model: half the range of its figures, as a share of them.
    """

    name: str
    kind: Kind
    scope: Scope
    source: str
    refresh_s: float
    resolution: float
    poll_s: float
    lag_s: float = 0.0
    needs: str = ""
    systematic: str = "not known"
    notes: tuple[str, ...] = ()
    model_error: float = 0.0

    @property
    def is_estimate(self) -> bool:
        """Returns whether the figures come from a power model, not a measurement."""
        return self.scope is Scope.ESTIMATE

    @property
    def is_replay(self) -> bool:
        """Returns whether the figures come from a recording of another run."""
        return self.name.startswith(REPLAYED)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"notes": list(self.notes), "estimate": self.is_estimate}


class Meter(Protocol):
    """Reads one source. A counter's value never decreases, because the meter corrects the wrap of its registers."""

    @property
    def facts(self) -> MeterFacts:
        """The facts of this meter."""
        ...

    def read(self) -> Sample | None:
        """Returns a reading, or None if it is known to be invalid. Raises MeterError if the source is gone or wrong."""
        ...


class MeterState(StrEnum):
    """Whether a meter can be used here and now."""

    USABLE = "usable"
    PRESENT = "present"  # exists, but access is denied or it cannot be used now; see `reason` and `remedy`
    ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of `edge-devices meters`."""

    name: str
    state: MeterState
    reason: str = ""
    remedy: str = ""
    meter: Meter | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys. `facts` is null unless the meter is usable."""
        facts = self.meter.facts.to_json() if self.meter else None
        return {"name": self.name, "state": self.state, "reason": self.reason, "remedy": self.remedy, "facts": facts}


class Preference(IntEnum):
    """The order in which meters are chosen: first those that measure close to the work, then slow gauges of a whole device."""

    BOARD = 1  # a board's own sensors
    SUPPLY_LINE = 2  # chips in a supply line, whose wiring is unknown
    COUNTER = 3  # counters of processors and rails
    MODEL = 4  # watts from the maker's power model
    MEAN = 5  # watts averaged by a driver
    BATTERY = 6  # gauges of a battery, which must be discharging
    GRAPHICS = 7  # a graphics board, which is used only if requested by name


@dataclass(frozen=True, kw_only=True)
class MeterSource:
    """One kind of meter. `find` lists those of a machine as usable, present but not usable, or absent.

    It lists none on a system that cannot have them. `name` is the meter's name, or the beginning of its meters' names; it is reported if
    `find` raises MeterError or OSError. `files` are patterns below the root, and `commands` are lists of words: all that `find` and its
    meters read from files, and from commands without input. A snapshot of a remote device holds these.
    """

    name: str
    find: Callable[[System], list[Finding]]
    preference: Preference
    files: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()


def usable(meter: Meter) -> Finding:
    """Returns the finding of a meter that can be read now."""
    return Finding(name=meter.facts.name, state=MeterState.USABLE, meter=meter)


def present(name: str, reason: str, remedy: str = "") -> Finding:
    """Returns the finding of a meter that exists but is not usable."""
    return Finding(name=name, state=MeterState.PRESENT, reason=reason, remedy=remedy)


def absent(name: str, reason: str) -> Finding:
    """Returns the finding of a meter that this machine does not have."""
    return Finding(name=name, state=MeterState.ABSENT, reason=reason)


def tried(meter: Meter, denied: tuple[str, str] | None = None) -> Finding:
    """Reads a meter once, and returns a finding that it is usable, or why not. `denied` is reason and remedy if permission is missing."""
    try:
        meter.read()
    except MeterError as error:
        if denied is not None and isinstance(error.__cause__, PermissionError):
            return present(meter.facts.name, *denied)
        return present(meter.facts.name, str(error))
    return usable(meter)


def required_number(
    system: System, path: str, missing: str, denied: str = "is denied to this user; make it readable with a udev rule"
) -> int:
    """Returns the integer in a file. Raises MeterError with the words `denied` or, if there is no integer, with the reason `missing`."""
    try:
        number = system.number(path)
    except PermissionError as error:
        raise MeterError(f"/{path} {denied}") from error
    if number is None:
        raise MeterError(f"/{path} holds no number; {missing}")
    return number


def required_product(system: System, paths: Iterable[str]) -> int:
    """Returns the product of the integers in a chip's files. Raises MeterError, as `required_number` does."""
    return math.prod(required_number(system, path, "the chip may not answer on its bus") for path in paths)


STEP_SLACK_S = 0.01  # a register may have counted for this much longer than the clock says between two readings


class Unwrapped:
    """Turns a register that restarts at 0 after `span` (in its own units) into a number that never decreases.

    It is exact if the register is read at least once per wrap. Without a span, a decrease means that the source was reset, which is an
    error; so is a step of more than `most_per_s` units per second. After an error it continues from that reading.
    """

    def __init__(self, name: str, span: int | None, most_per_s: float = math.inf) -> None:
        self._name, self._span, self._most_per_s = name, span, most_per_s
        self._last: float | None = None
        self._last_s = 0.0
        self._total = 0.0

    def total(self, register: float, time_s: float = 0.0) -> float:
        """Takes a reading of the register, and returns the total without wraps. Raises MeterError for an impossible reading."""
        if register < 0 or (self._span is not None and register > self._span):
            raise MeterError(f"{self._name} reads {register}, outside 0..{self._span}; the meter cannot be trusted")
        last, seconds = self._last, time_s - self._last_s
        self._last, self._last_s = register, time_s
        if last is None:
            self._total = register
            return self._total
        step = register - last
        if step < 0 and self._span is None:
            raise MeterError(f"{self._name} went back from {last} to {register}: it was reset; measure again")
        if step < 0:
            step += self._span or 0
        if step > self._most_per_s * (seconds + STEP_SLACK_S):
            raise MeterError(
                f"{self._name} went from {last} to {register} in {seconds:.3g} s, more than any device takes: it was reset; measure again"
            )
        self._total += step
        return self._total


class SumMeter:
    """A meter whose value is the sum of named parts, which are registers of a counter, or watts."""

    def __init__(
        self,
        system: System,
        facts: MeterFacts,
        read_parts: Callable[[], Iterable[tuple[str, float]] | None],
        *,
        scale: float = 1.0,
        spans: Mapping[str, int | None] | None = None,
        most_watts: float = math.inf,
    ) -> None:
        """`read_parts` returns None for a reading that is known to be invalid. `scale` is the joules or watts of a part's unit.

        `spans` are those of registers, at which they wrap. No register can count more than `most_watts`.
        """
        self.facts = facts
        self._system, self._read_parts, self._scale, self._spans = system, read_parts, scale, spans or {}
        self._most_per_s = most_watts / scale
        self._registers: dict[str, Unwrapped] = {}

    def read(self) -> Sample | None:
        """Reads all parts. Raises MeterError if the parts of a counter changed, or if one went back."""
        parts = self._read_parts()
        if parts is None:
            return None
        parts, now = list(parts), self._system.clock()
        values = self._totals(dict(parts), now) if self.facts.kind is Kind.COUNTER else [value for _, value in parts]
        return Sample(now, sum(values) * self._scale, " ".join(f"{name}={value}" for name, value in parts))

    def _totals(self, readings: Mapping[str, float], now: float) -> list[float]:
        if self._registers and self._registers.keys() != readings.keys():
            raise MeterError("the metered rails changed while measuring; leave them as they are and measure again")
        for name in readings.keys() - self._registers.keys():
            self._registers[name] = Unwrapped(name, self._spans.get(name), self._most_per_s)
        return [self._registers[name].total(value, now) for name, value in readings.items()]


@dataclass(kw_only=True)
class Trace:
    """Readings of one meter, sorted by time in seconds. Values are joules (counter) or watts (sampler)."""

    facts: MeterFacts
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @staticmethod
    def of(facts: MeterFacts, samples: Iterable[Sample]) -> Trace:
        """Returns a trace of samples. Raises MeasurementError if a time decreases."""
        trace = Trace(facts=facts)
        for sample in samples:
            trace.add(sample)
        return trace

    def add(self, sample: Sample) -> None:
        """Appends a reading. Raises MeasurementError if its time decreases or a value is not finite."""
        if not (math.isfinite(sample.time_s) and math.isfinite(sample.value)):
            raise MeasurementError(f"the recording holds {sample.value} at {sample.time_s} s, which is not a number; record it again")
        if self.times and sample.time_s < self.times[-1]:
            raise MeasurementError(f"the recording goes back in time, from {self.times[-1]} to {sample.time_s} s; record it again")
        self.times.append(sample.time_s)
        self.values.append(sample.value)

    def index_at(self, time_s: float) -> int:
        """Returns the index of the last reading at or before a time. Raises MeasurementError if there is none."""
        index = bisect_right(self.times, time_s) - 1
        if index < 0:
            raise MeasurementError(f"the recording begins only after {time_s:.3f} s; start the meter before the work")
        return index

    def span(self, start_s: float, end_s: float) -> range:
        """Returns the indices of the readings in [start_s, end_s]."""
        return range(bisect_right(self.times, math.nextafter(start_s, -math.inf)), bisect_right(self.times, end_s))
