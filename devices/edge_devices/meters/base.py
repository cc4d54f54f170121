"""The interface of all meters: facts about a meter, one way to read it, and the findings of a search."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol


class Scope(StrEnum):
    """What a figure covers. Figures of different scopes are never added, ranked or put in one column."""

    PACKAGE = "package"  # the processor package: cores, integrated graphics, caches
    DRAM = "dram"  # the memory plane, where it has a counter of its own
    PLATFORM = "platform"  # psys: the package and what else the board's maker wired
    RAILS = "rails"  # supply rails behind the battery, summed
    BOARD = "board_sensed"  # rails of a single-board computer's supply chip, summed; not its input
    MODULE = "module_in"  # the input of a compute module or of the rail a sensor sits in
    DEVICE = "device_battery"  # the whole device, display and radios included
    GPU = "gpu_board"  # one graphics board with its memory
    EXTERNAL = "external_dc"  # a meter in the supply line
    WALL = "wall"  # a meter at the mains
    ESTIMATE = "estimate"  # no measurement: a power model


class Kind(StrEnum):
    """A counter returns cumulative joules; a sampler returns watts to integrate."""

    COUNTER = "counter"
    SAMPLER = "sampler"


class Sample(NamedTuple):
    """One reading: seconds on the system's clock, joules since an arbitrary start (counter) or watts (sampler), and the raw text."""

    time_s: float
    value: float
    raw: str = ""


@dataclass(frozen=True, kw_only=True)
class MeterFacts:
    """The properties of a meter that are known before it is characterised.

    `refresh_s`, `lag_s`: expected seconds between new values and until a load shows; `resolution`: joules or watts; `poll_s`: seconds
    between reads (no less than a read may cost); `needs`: what the user must provide; `systematic`: errors that repetition does not remove;
    `model_error`: of a power model, half the range that its figures may be off by, as a share of them.
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

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return asdict(self) | {"notes": list(self.notes), "estimate": self.is_estimate}

    @staticmethod
    def from_json(record: dict[str, Any]) -> MeterFacts:
        """Reads what `to_json` wrote; raises KeyError, TypeError or ValueError for anything else."""
        fields = {k: v for k, v in record.items() if k != "estimate"}
        fields["kind"], fields["scope"] = Kind(fields["kind"]), Scope(fields["scope"])
        fields["notes"] = tuple(str(n) for n in fields.get("notes", ()))
        for name in ("refresh_s", "resolution", "poll_s", "lag_s", "model_error"):
            fields[name] = float(fields.get(name, 0.0))
        return MeterFacts(**fields)


class Meter(Protocol):
    """Reads one source. A counter's value never decreases: the meter undoes the wrap of its registers."""

    @property
    def facts(self) -> MeterFacts:
        """The facts of this meter."""
        ...

    def read(self) -> Sample | None:
        """Returns a reading, or None for one known to be invalid; raises MeterError if the source is gone or wrong."""
        ...


class State(StrEnum):
    """Whether a meter can be used here and now."""

    USABLE = "usable"
    PRESENT = "present"  # exists, but access is denied or it is unfit now: see `reason` and `remedy`
    ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of `edge-devices meters`."""

    name: str
    state: State
    reason: str = ""
    remedy: str = ""
    meter: Meter | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys; `facts` is null unless the meter is usable."""
        facts = self.meter.facts.to_json() if self.meter else None
        return {"name": self.name, "state": self.state, "reason": self.reason, "remedy": self.remedy, "facts": facts}


def usable(meter: Meter) -> Finding:
    """Returns the finding of a meter that can be read now."""
    return Finding(name=meter.facts.name, state=State.USABLE, meter=meter)


def present(name: str, reason: str, remedy: str = "") -> Finding:
    """Returns the finding of a meter that exists but is not usable."""
    return Finding(name=name, state=State.PRESENT, reason=reason, remedy=remedy)


def absent(name: str, reason: str) -> Finding:
    """Returns the finding of a meter that this machine does not have."""
    return Finding(name=name, state=State.ABSENT, reason=reason)
