"""A phone that stays awake while it measures, and gets its settings back however the run ends.

Off the charger, Android suspends everything a while after the screen goes off. The shell user can take no wake lock, so the screen stays
on: its timeout is lengthened, and the phone is woken before each sample. The screen's watts are in idle power too. Doze is disabled.

What the settings were is written to a file before they are changed. Whoever comes next puts them back from it: the run itself, or, where
that was killed or the phone went off, the next collecting, start or cleaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge_devices.machine.system import System
from edge_devices.transports.base import Transport
from edge_devices.transports.jobs import running_job

SETTING = "screen_off_timeout"
TIMEOUT_MS = 24 * 3600 * 1000
WAKE = ("input", "keyevent", "KEYCODE_WAKEUP")
# Both scripts get the file as $1. A file that is already there has the values of before an earlier run, and stays. What could not be read
# is not changed, as it could not be put back. What did not work is printed.
READ = f"""f="$1"
timeout_now() {{ settings get system {SETTING} 2>/dev/null; }}
read_settings() {{
  timeout="$(sed -n 's/^timeout=//p' "$f")"; doze="$(sed -n 's/^doze=//p' "$f")"
  case "$timeout" in null) ;; *[!0-9]*) timeout=;; esac
}}
"""
CHANGE = f"""{READ}
test -s "$f" || {{
  {{ echo "timeout=$(timeout_now)"; echo "doze=$(dumpsys deviceidle enabled all 2>/dev/null)"; }} > "$f.new" && sync && mv "$f.new" "$f"
}} || {{ echo "the phone's settings could not be written to $f, so that it is not kept awake"; exit 0; }}
read_settings
if test -z "$timeout"; then echo "the screen's timeout is not known and stays as it is, so that the phone may fall asleep"
else
  settings put system {SETTING} {TIMEOUT_MS}
  test "$(timeout_now)" = {TIMEOUT_MS} || echo "the screen's timeout could not be lengthened, so that the phone may fall asleep"
fi
if test "$doze" = 1; then dumpsys deviceidle disable all > /dev/null || echo "Doze could not be disabled and may suspend the run"; fi
exit 0
"""
RESTORE = f"""{READ}
test -s "$f" || exit 0
read_settings
case "$timeout" in
  null) settings delete system {SETTING} > /dev/null;;
  ?*) settings put system {SETTING} "$timeout" && test "$(timeout_now)" = "$timeout";;
esac || {{ echo "the screen's timeout could not be put back: settings put system {SETTING} $timeout"; exit 1; }}
if test "$doze" = 1; then
  dumpsys deviceidle enable all > /dev/null || {{ echo "Doze could not be put back: dumpsys deviceidle enable all"; exit 1; }}
fi
rm -f "$f" && echo restored
"""


@contextmanager
def kept_awake(system: System, file: str, report: Callable[[str], None]) -> Iterator[bool]:
    """Keeps a phone awake inside the block; yields whether this is one. Elsewhere, or without a `file` for its settings, it does nothing.

    `report` gets a sentence on each thing that did not work.
    """
    if not system.is_android or not file:
        yield False
        return
    for line in system.run(["sh", "-c", CHANGE, "sh", file]).text.splitlines():
        report(line)
    wake(system)
    try:
        yield True
    finally:
        done = system.run(["sh", "-c", RESTORE, "sh", file])
        if done.code != 0:
            report(done.first_line)


def wake(system: System) -> None:
    """Turns a phone's screen on."""
    system.run(list(WAKE))


def restore_settings(transport: Transport, log: Callable[[str], None]) -> None:
    """Puts back the settings that a run which was cut off left changed; does nothing while a run goes on. Failures go to `log`."""
    if not transport.settings or running_job(transport):
        return
    done = transport.run(["sh", "-c", RESTORE, "sh", transport.settings])
    if done.code != 0:
        log(f"the phone's settings are still those of a run that was cut off: {done.first_line}")
    elif done.text:
        log("the screen's timeout and Doze are as they were before a run that was cut off")
