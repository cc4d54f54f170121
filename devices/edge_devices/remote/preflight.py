"""What to refuse and what to say before a run on a device begins: docs/energy.md, protocol, and what phones do to long work."""

from __future__ import annotations

from edge_devices.machine.android import thermal_name
from edge_devices.machine.state import refusals, warnings
from edge_devices.remote.snapshot import DeviceSnapshot

LEAST_ROOM = 64 << 20  # for results, logs and temporary files
FLAT, LOW = 10, 30  # percent
TOO_HOT, WARM = 45.0, 38.0  # °C of a phone's battery
# What `uname -m` calls the processors of a package's platform.
PROCESSORS = {"arm64": ("aarch64", "arm64"), "x64": ("x86_64", "amd64")}


def preflight_refusals(snapshot: DeviceSnapshot, *, platform: str, at_battery: bool, waits_for_unplugging: bool = False) -> list[str]:
    """Returns why nothing should be run; each a sentence. `at_battery`: energy is to be read from the device's own battery."""
    found = []
    wanted = PROCESSORS.get(platform.rpartition("-")[2], ())
    if wanted and snapshot.architecture and snapshot.architecture not in wanted:
        found.append(f"the package is for {platform}, the device's processor is {snapshot.architecture}: build the package for it")
    if snapshot.free_bytes is not None and snapshot.free_bytes < LEAST_ROOM:
        found.append(f"{snapshot.free_bytes / 1e6:.0f} MB are free on the device: delete something, {LEAST_ROOM / 1e6:.0f} MB are needed")
    if snapshot.frozen and at_battery:
        found.append("the battery service is frozen and answers made-up values: run `dumpsys battery reset` on the device")
    percent = snapshot.state.charge_percent
    if percent is not None and percent < FLAT and (not snapshot.state.charger or waits_for_unplugging):
        found.append(f"the battery is at {percent} %: charge it, or it will be empty in the middle")
    if snapshot.android and snapshot.state.temperature_c is not None and snapshot.state.temperature_c >= TOO_HOT:
        found.append(f"the phone has {snapshot.state.temperature_c:.0f} °C: let it cool")
    against = refusals(snapshot.state, at_battery=at_battery)
    # A job that waits for unplugging is checked again afterwards.
    return found + [refusal.sentence for refusal in against if not (waits_for_unplugging and refusal.code == "charger")]


def preflight_warnings(snapshot: DeviceSnapshot, *, model_bytes: int, at_battery: bool) -> list[str]:
    """Returns what a reader of the figures should know. `model_bytes`: of the files that a run maps into memory."""
    found = warnings(snapshot.state)
    state = snapshot.state
    if snapshot.memory_available is not None and snapshot.memory_available < model_bytes:
        found.append(
            f"{snapshot.memory_available / 1e6:.0f} MB of memory are available and the model has {model_bytes / 1e6:.0f} MB: it will be read again and again"
        )
    if state.charger and not at_battery and snapshot.android:
        found.append(f"{state.charger} charges the phone, which heats it")
    if state.charge_percent is not None and FLAT <= state.charge_percent < LOW and not state.charger:
        found.append(f"the battery is at {state.charge_percent} %, where the voltage sags")
    if snapshot.android and state.temperature_c is not None and WARM <= state.temperature_c < TOO_HOT:
        found.append(f"the phone has {state.temperature_c:.0f} °C already")
    if state.thermal_status == 1:
        found.append(f"the phone's thermal status is {thermal_name(1)}")
    if snapshot.screen is not None and snapshot.screen != "Awake":
        found.append(f"the screen is off ({snapshot.screen}): Android may put the run aside; keep it on with developer options, Stay awake")
    if snapshot.doze:
        found.append(
            "doze is enabled: an idle phone may put the run aside; `dumpsys deviceidle disable` prevents it until the next restart"
        )
    if snapshot.frozen and not at_battery:
        found.append("the battery service is frozen (`dumpsys battery reset` ends that)")
    return found
