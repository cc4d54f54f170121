"""What somebody who contributes a measurement is asked to do first, by the meter that is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_devices.meters.base import MeterFacts, Scope

CLOSE = "close browsers, updates, backups and everything else that computes; leave the machine alone until the end"
PLACE = "place it as it is used: on a table, no cushion, fan free, not in the sun"
BY_SCOPE = {
    Scope.DEVICE: (
        "charge the battery to 40 to 90 %, then unplug the charger and every USB device",
        "set the screen to its lowest brightness and keep it on",
    ),
    Scope.BOARD: (
        "use the maker's power supply; unplug USB disks and HATs: the board's sensors do not see them",
        "a Raspberry Pi needs its fan or heat sink: a throttled run does not count",
    ),
    Scope.EXTERNAL: ("plug the meter between supply and device, and start its recording now",),
    Scope.WALL: ("plug the device alone into the meter, and start its recording now",),
    Scope.ESTIMATE: ("nothing is measured: watts are a model's, and the record is labelled ESTIMATE",),
}
PLUGGED = ("plug in the charger: a processor's meter does not depend on it, and batteries change the clocks",)
REMOTE = (
    "keep the cable in, or wireless adb connected, until this program says that the run has started",
    "a phone without rail meters is measured at its battery: add --unplugged, and unplug it when asked",
)
REPLY = "Press Enter to begin, or Ctrl-C to leave: "


def steps(facts: MeterFacts | None, minutes: int) -> list[str]:
    """Returns the steps before a measurement, numbered; `facts` None: on another device, whose meter is not known yet."""
    own: Sequence[str] = REMOTE if facts is None else BY_SCOPE.get(facts.scope, PLUGGED)
    every = [
        *own,
        CLOSE,
        PLACE,
        f"wait: this takes about {minutes} minutes; Ctrl-C keeps what was measured, but such a record does not count",
    ]
    head = "the device's own meter" if facts is None else f"meter {facts.name}, scope {facts.scope}"
    return [f"Joules per token of this bundle, with {head}:", *(f"  {number}. {text}" for number, text in enumerate(every, start=1))]


def wait_for_enter(interactive: bool, ask: Callable[[str], str] = input) -> None:
    """Waits for Enter where somebody can press it."""
    if interactive:
        ask(REPLY)
