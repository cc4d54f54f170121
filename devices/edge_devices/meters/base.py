"""What every meter is: facts about it, and one way to read it."""

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
    """A counter answers cumulative joules, a sampler watts to integrate."""

    COUNTER = "counter"
    SAMPLER = "sampler"


class Sample(NamedTuple):
    """One reading: seconds on the system's clock, joules since some start (counter) or watts (sampler), and what was read."""

    time_s: float
    value: float
    raw: str = ""


@dataclass(frozen=True, kw_only=True)
class MeterFacts:
    """What is known of a meter before it is characterised.

    `refresh_s`, `lag_s`: expected seconds between new values and until a load shows; `resolution`: joules or watts; `poll_s`: seconds
    between reads (no less than a read may cost); `needs`: what a user must have or do; `systematic`: errors no repetition removes.
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

    @property
    def is_estimate(self) -> bool:
        """Returns whether no energy is measured at all."""
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
        for name in ("refresh_s", "resolution", "poll_s", "lag_s"):
            fields[name] = float(fields.get(name, 0.0))
        return MeterFacts(**fields)


class Meter(Protocol):
    """Reads one source. A counter's value only grows: the meter itself undoes the wrap of its registers."""

    @property
    def facts(self) -> MeterFacts:
        """What is known of this meter."""
        ...

    def read(self) -> Sample | None:
        """Returns a reading, None for one that is known to mean nothing; raises MeterError when the source is gone or lies."""
        ...


class State(StrEnum):
    """Whether a meter can be used here and now."""

    USABLE = "usable"
    PRESENT = "present"  # it is there, but denied or unfit now: `reason` and `remedy` say more
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
    """Returns the finding of a meter that is there but not usable."""
    return Finding(name=name, state=State.PRESENT, reason=reason, remedy=remedy)


def absent(name: str, reason: str) -> Finding:
    """Returns the finding of a meter this machine has not."""
    return Finding(name=name, state=State.ABSENT, reason=reason)
