"""Apple's IOReport counters, on made-up values in the form that other programs read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Kind, MeterState
from edge_devices.meters.ioreport import Counter, find, joules

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
    (finding,) = find(MAC, lambda: readings.__next__)
    assert finding.meter is not None
    assert (finding.name, finding.meter.facts.kind) == ("apple:ioreport", Kind.COUNTER)
    before, after = finding.meter.read(), finding.meter.read()
    assert before is not None
    assert after is not None
    assert after.value - before.value == pytest.approx(6.0 + 0.5 + 0.005 + 0.4)


def test_what_is_not_there_is_told() -> None:
    assert find(System(platform="linux")) == []
    assert find(MAC, lambda: None)[0].state is MeterState.ABSENT
    with pytest.raises(MeterError, match="it has DISP, ECPU0, GPU SRAM, PCPU"):
        joules(PARTS)
    (finding,) = find(MAC, lambda: lambda: [Counter("CPU Energy", "pW", 1)])
    assert (finding.state, finding.meter) == (MeterState.PRESENT, None)
