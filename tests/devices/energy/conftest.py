"""A measurement in simulated time, shared by the tests of the energy package."""

from __future__ import annotations

import pytest

from edge_devices.energy.run_log import RunLog
from simulated_session import SimulatedMachine, run_protocol


@pytest.fixture(scope="module")
def log() -> RunLog:
    """Plain decoding at 12 W, 2 s for 50 tokens; drafting at 14 W, 1 s."""
    machine = SimulatedMachine()
    workloads = {"plain": machine.workload(12.0), "drafted": machine.workload(14.0, decode_s=1.0)}
    return run_protocol(machine, workloads, load_step=machine.load)
