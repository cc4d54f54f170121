"""IOReport's counters, on made-up values in the form that other programs read, and what powermetrics prints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.apple import Counter, find_ioreport, joules, package_watts, parse_powermetrics
from edge_devices.meters.base import Kind, MeterState
from edge_devices.meters.search import find_meters
from edge_devices.remote.snapshot import RecordedSystem, Recording

MAC = System(platform="darwin", clock=iter(range(100)).__next__)
PARTS = [Counter("ECPU0", "mJ", 4_000), Counter("PCPU", "mJ", 9_000), Counter("GPU SRAM", "mJ", 10), Counter("DISP", "mJ", 70_000)]


def sums(cpu: int, gpu: int, ane: int, dram: int) -> list[Counter]:
    return [Counter("CPU Energy", "mJ", cpu), Counter("GPU Energy", "nJ", gpu), Counter("ANE", "mJ", ane), Counter("DRAM", "uJ", dram)]


FIRST, LATER = sums(14_000, 2_000_000_000, 0, 500_000), sums(20_000, 2_500_000_000, 5, 900_000)


def test_sums_are_counted_once_and_in_joules() -> None:
    assert dict(joules([*PARTS, *FIRST])) == pytest.approx({"CPU Energy": 14.0, "GPU Energy": 2.0, "ANE": 0.0, "DRAM": 0.5})
    dies = [Counter(f"DIE_{die}_CPU Energy", "mJ", 1_000) for die in range(2)]
    assert sum(value for _, value in joules(dies)) == pytest.approx(2.0)


def test_a_mac_has_a_counter_without_root() -> None:
    readings: Iterator[list[Counter]] = iter([[*PARTS, *FIRST], [*PARTS, *FIRST], [*PARTS, *LATER]])
    (finding,) = find_ioreport(MAC, lambda: readings.__next__)
    assert finding.meter is not None
    assert (finding.name, finding.meter.facts.kind) == ("apple:ioreport", Kind.COUNTER)
    before, after = finding.meter.read(), finding.meter.read()
    assert before is not None
    assert after is not None
    assert after.value - before.value == pytest.approx(6.0 + 0.5 + 0.005 + 0.4)


def test_what_is_not_there_is_told() -> None:
    assert find_ioreport(System(platform="linux")) == []
    assert find_ioreport(MAC, lambda: None)[0].state is MeterState.ABSENT
    with pytest.raises(MeterError, match="it has DISP, ECPU0, GPU SRAM, PCPU"):
        joules(PARTS)
    (finding,) = find_ioreport(MAC, lambda: lambda: [Counter("CPU Energy", "pW", 1)])
    assert (finding.state, finding.meter) == (MeterState.PRESENT, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CPU Power: 947 mW\nGPU Power: 153 mW\nANE Power: 0 mW\n", 1.1),
        ("CPU Power: 1.947 mW\nCombined Power (CPU + GPU + ANE): 2.100 mW\n", 2.1),
        ("Combined Power (CPU + GPU + ANE): 12,345 mW\n", 12.345),
        ("Combined Power (CPU + GPU + ANE): 12\u202f345 mW\n", 12.345),
        ("CPU Power: 947,5 mW\n", 0.9475),
        ("Combined Power (CPU + GPU + ANE): 0.947 W\n", 0.947),
        ("Intel energy model derived package power (CPUs+GT+SA): 2.48W\n", 2.48),
        ("Intel energy model derived package power (CPUs+GT+SA): 2,480W\n", 2.48),
    ],
)
def test_powermetrics_of_all_regions_and_processors(text: str, expected: float) -> None:
    assert package_watts(parse_powermetrics(text)) == pytest.approx(expected)


def test_an_output_of_powermetrics_without_power_is_not_called_denied() -> None:
    command = "powermetrics -n 1 -i 1000 --samplers cpu_power"
    for code, words in ((0, "prints no power that this version reads"), (1, "denied to this user")):
        system = RecordedSystem(Recording(platform="darwin", commands={command: (code, "*** Sampled system activity\n")}))
        (result,) = [f for f in find_meters(system) if f.name == "apple:powermetrics"]
        assert words in result.reason
