"""Checks of a device before a run: reasons to refuse it, and warnings for the reader of its figures (docs/energy.md, protocol)."""

from __future__ import annotations

from edge_devices.machine.android import thermal_name
from edge_devices.machine.memory import byte_text
from edge_devices.machine.state import refusals, warnings
from edge_devices.remote.snapshot import DeviceSnapshot

MIN_FREE_BYTES = 64 << 20  # for results, logs and temporary files
FLAT, LOW = 10, 30  # percent
TOO_HOT, WARM = 45.0, 38.0  # °C of a phone's battery
# The names that `uname -m` gives the processors of a package's platform.
PROCESSORS = {"arm64": ("aarch64", "arm64"), "x64": ("x86_64", "amd64")}


def preflight_refusals(snapshot: DeviceSnapshot, *, platform: str, at_battery: bool, waits_for_unplugging: bool = False) -> list[str]:
    """Returns the reasons against a run, one sentence each. `at_battery`: energy is read from the device's own battery."""
    found = []
    wanted = PROCESSORS.get(platform.rpartition("-")[2], ())
    if wanted and snapshot.architecture and snapshot.architecture not in wanted:
        found.append(f"the package is for {platform}, but the device's processor is {snapshot.architecture}: build a package for it")
    if snapshot.free_bytes is not None and snapshot.free_bytes < MIN_FREE_BYTES:
        found.append(f"{byte_text(snapshot.free_bytes)} are free on the device, {byte_text(MIN_FREE_BYTES)} are needed: delete files there")
    if snapshot.frozen and at_battery:
        found.append("the battery service is frozen and reports fixed values: run `dumpsys battery reset` on the device")
    percent = snapshot.state.charge_percent
    if percent is not None and percent < FLAT and (not snapshot.state.charger or waits_for_unplugging):
        found.append(f"the battery is at {percent} %: charge it first, or it runs empty during the run")
    if snapshot.android and snapshot.state.temperature_c is not None and snapshot.state.temperature_c >= TOO_HOT:
        found.append(f"the phone is at {snapshot.state.temperature_c:.0f} °C: let it cool below {TOO_HOT:.0f} °C")
    reasons = refusals(snapshot.state, at_battery=at_battery)
    # A job that waits for unplugging is checked again afterwards.
    return found + [refusal.sentence for refusal in reasons if not (waits_for_unplugging and refusal.code == "charger")]


def preflight_warnings(snapshot: DeviceSnapshot, *, model_bytes: int, at_battery: bool) -> list[str]:
    """Returns warnings for the reader of the figures. `model_bytes`: size of the files that a run maps into memory."""
    found = warnings(snapshot.state)
    state = snapshot.state
    if snapshot.memory_available is not None and snapshot.memory_available < model_bytes:
        found.append(
            f"{byte_text(snapshot.memory_available)} of memory are available and the model has {byte_text(model_bytes)}: "
            "it will be read from storage repeatedly"
        )
    if state.charger and not at_battery and snapshot.android:
        found.append(f"{state.charger} charges the phone, which heats it")
    if state.charge_percent is not None and FLAT <= state.charge_percent < LOW and not state.charger:
        found.append(f"the battery is at {state.charge_percent} %, where the voltage sags")
    if snapshot.android and state.temperature_c is not None and WARM <= state.temperature_c < TOO_HOT:
        found.append(f"the phone is already at {state.temperature_c:.0f} °C")
    if state.thermal_status == 1:
        found.append(f"the phone's thermal status is {thermal_name(1)}")
    if snapshot.screen is not None and snapshot.screen != "Awake":
        found.append(f"the screen is off ({snapshot.screen}): Android may suspend the run; keep it on with developer options, Stay awake")
    if snapshot.doze:
        found.append("doze is enabled: an idle phone may suspend the run; `dumpsys deviceidle disable` prevents it until the next restart")
    if snapshot.frozen and not at_battery:
        found.append("the battery service is frozen (`dumpsys battery reset` ends that)")
    return found
