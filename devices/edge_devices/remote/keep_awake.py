"""Keeps a phone awake while it measures: off the charger, Android suspends everything a while after the screen goes off.

The shell user can take no wake lock, so the screen stays on: its timeout is lengthened, and the phone is woken before each sample. The
screen's watts are in idle power too. Doze is disabled. Both settings are put back at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from edge_devices.machine.system import System

TIMEOUT_MS = 24 * 3600 * 1000
WAKE = ("input", "keyevent", "KEYCODE_WAKEUP")


@contextmanager
def kept_awake(system: System) -> Iterator[bool]:
    """Keeps the phone awake inside the block; yields whether it is one. Elsewhere it does nothing."""
    if not system.is_android:
        yield False
        return
    before = system.run(["settings", "get", "system", "screen_off_timeout"]).text.strip()
    doze = system.run(["dumpsys", "deviceidle", "enabled", "all"]).text.strip() == "1"
    system.run(["settings", "put", "system", "screen_off_timeout", str(TIMEOUT_MS)])
    system.run(list(WAKE))
    if doze:
        system.run(["dumpsys", "deviceidle", "disable", "all"])
    try:
        yield True
    finally:
        if re.fullmatch(r"\d{1,10}", before):
            system.run(["settings", "put", "system", "screen_off_timeout", before])
        else:
            system.run(["settings", "delete", "system", "screen_off_timeout"])
        if doze:
            system.run(["dumpsys", "deviceidle", "enable", "all"])
