"""`edge-devices`: facts about this machine and its energy meters."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from edge_devices.command_line import PanelGroup
from edge_devices.energy.protocol import busy_load, characterise_meter
from edge_devices.energy.recorder import Characteristics
from edge_devices.energy.report import meter_lines
from edge_devices.errors import DeviceError, byte_text
from edge_devices.machine.detection import Profile, detect_device, profiles
from edge_devices.machine.memory import read_bandwidth
from edge_devices.machine.processors import usable_processors
from edge_devices.machine.system import System
from edge_devices.meters.base import Meter
from edge_devices.meters.search import find_meters

# CPU flags on which the choice of matrix kernels depends.
SPEED_FEATURES = {
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "asimdhp",
    "i8mm",
    "bf16",
    "sve",
    "sve2",
    "sme",
}


EXAMPLES = """
\b
Examples:
  edge-devices detect --json
  edge-devices meters --measure
  edge-devices profiles
"""


@click.group(cls=PanelGroup, epilog=EXAMPLES)
@click.version_option(package_name="edge-mtp")
def main() -> None:
    """Describe this device and its energy meters.

    To predict a model's speed on a device: `edge-run plan BUNDLE --profile NAME`, or before an export `edge-export plan
    TARGET DRAFTER`. For the figures of an energy log: `edge-bench report LOG`.
    """


@main.command()
@click.option("--bandwidth/--no-bandwidth", default=True, help="Probe memory bandwidth (a few tenths of a second).", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def detect(bandwidth: bool, as_json: bool) -> None:
    """Read processor, clusters, features and memory of this machine, and pick or build its profile."""
    device = detect_device(System())
    machine = device.machine
    speed = read_bandwidth(device.threads, memory_available=machine.memory_available) if bandwidth else None
    if as_json:
        click.echo(json.dumps(device.to_json() | {"read_bytes_per_second": speed}))
        return
    click.echo(f"{machine.system} {machine.architecture}, {machine.processor or 'unknown processor'}")
    click.echo(f"processors this process may use: {machine.usable_processors}")
    for cluster in device.clusters:
        click.echo(f"cluster: {len(cluster.processors)} processors, up to {cluster.max_mhz:.0f} MHz")
    memory = byte_text(machine.memory_available) if machine.memory_available is not None else "unknown"
    click.echo(f"memory available: {memory}")
    if speed is not None:
        click.echo(f"memory read: {speed / 1e9:.1f} GB/s, {device.threads} threads")
    if device.drivers:
        click.echo(f"drivers of GPUs and NPUs: {'; '.join(device.drivers)}")
    kernel_flags = [f for f in machine.features if f in SPEED_FEATURES]
    click.echo(f"instructions that kernels use: {' '.join(kernel_flags) or 'none known'} (--json has all {len(machine.features)} flags)")
    click.echo(f"profile: {device.profile.name} ({device.profile.title}), because {device.why}")
    click.echo(f"recommended: {device.profile.quantization}, {device.threads} threads")
    click.echo(
        f"meters of such devices: {', '.join(device.profile.meters) or 'none known'}; edge-devices meters lists those that work here"
    )


@main.command(name="profiles")
@click.option("--json", "as_json", is_flag=True, help="Print the profiles in full as one JSON object.")
def list_profiles(as_json: bool) -> None:
    """List the device profiles, for edge-run plan --profile NAME."""
    if as_json:
        click.echo(json.dumps({name: asdict(profile) for name, profile in profiles().items()}))
        return
    for name, profile in profiles().items():
        click.echo(f"{name:<20} {profile.title}; {profile.quantization}; drafts {profile.draft_length[0]}-{profile.draft_length[1]}")
        click.echo(f"{'':<20} {memory_text(profile)}; energy: {', '.join(profile.meters)} ({profile.energy_note})")


def memory_text(profile: Profile) -> str:
    """Returns the memory speed of a profile as text."""
    if profile.effective_gb_per_s is not None:
        return "memory {:g} to {:g} GB/s, measured by others".format(*profile.effective_gb_per_s)
    return f"memory {profile.peak_gb_per_s:.3g} GB/s at most" if profile.peak_gb_per_s else "memory speed not known"


@main.command()
@click.option(
    "--measure",
    is_flag=True,
    help="Also poll each usable meter under a load that goes on and off: its refresh, lag, cost of a read. Seconds, a "
    "slow gauge two minutes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def meters(measure: bool, as_json: bool) -> None:
    """List the energy meters: usable here, present but not usable and why, absent."""
    system = System()
    findings = find_meters(system)
    measured = {f.name: measured_meter(system, f.meter) for f in findings if f.meter} if measure else {}
    if as_json:
        facts = {name: result if isinstance(result, str) else asdict(result) for name, result in measured.items()}
        click.echo(json.dumps({"meters": [f.to_json() | ({"measured": facts.get(f.name)} if measure else {}) for f in findings]}))
        return
    for line in meter_lines(findings, measured):
        click.echo(line)


def measured_meter(system: System, meter: Meter) -> Characteristics | str:
    """Returns a meter's measured characteristics, or the reason why they could not be measured."""
    try:
        return characterise_meter(system, meter, lambda: busy_load(usable_processors()))
    except DeviceError as error:
        return str(error)
