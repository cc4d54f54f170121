"""A machine in simulated time: sleeping advances the clock, polls the recorder, and adds joules at the power of the moment."""

from __future__ import annotations

from contextlib import contextmanager

from edge_devices.energy.protocol import Plan, Work, characterise_meter, measure
from edge_devices.energy.recorder import Recorder
from edge_devices.energy.run_log import RunLog
from edge_devices.errors import MeterError
from edge_devices.meters.base import Kind, MeterFacts, Sample, Scope
from edge_devices.remote.snapshot import RecordedSystem, Recording

IDLE_WATTS = 2.0


class SimulatedMachine:
    """`system` and `meter` share this clock; `watts` is the power now. Its meter is a counter, or a sampler."""

    def __init__(self, kind: Kind = Kind.COUNTER, *, refresh_s: float = 0.001, files: dict[str, str] | None = None) -> None:
        self.now, self.energy, self.watts = 0.0, 0.0, IDLE_WATTS
        self.recorder: Recorder | None = None
        self.broken = False  # the meter cannot be read
        self.recording = Recording(files=files if files is not None else {})
        self.system = RecordedSystem(self.recording, clock=self.clock, sleep=self.sleep)
        self.facts = MeterFacts(
            name="simulated",
            kind=kind,
            scope=Scope.PACKAGE,
            source="simulated",
            refresh_s=refresh_s,
            resolution=1e-6,
            poll_s=max(0.2, refresh_s / 3),
        )
        self._next_poll = 0.0

    def clock(self) -> float:
        """Looking at the clock takes 10 microseconds."""
        self.now += 1e-5
        self.energy += 1e-5 * self.watts
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advances time, polling on the way."""
        end = self.now + seconds
        while self.recorder and self._next_poll < end:
            self._advance(max(self._next_poll, self.now))
            self.recorder.poll()
            self._next_poll = self.now + self.recorder.next_interval()
        self._advance(max(end, self.now))

    def _advance(self, to: float) -> None:
        self.energy += (to - self.now) * self.watts
        self.now = to

    def read(self) -> Sample:
        """The true energy, or the true power with a ripple that makes every reading a new one."""
        if self.broken:
            raise MeterError("the charger was plugged in")
        ripple = 0.001 * ((self.now * 7919) % 1 - 0.5)
        return Sample(self.now, self.energy if self.facts.kind is Kind.COUNTER else self.watts + ripple)

    @contextmanager
    def load(self):
        """A plain load of 5 W above idle."""
        self.watts += 5.0
        yield
        self.watts -= 5.0

    def workload(self, watts: float, *, tokens: int = 50, prefill_s: float = 0.0, prefill_watts: float = 0.0, decode_s: float = 2.0):
        """A request: prefill, then decode, each at its power."""

        def work() -> Work:
            self.watts = prefill_watts or watts
            self.sleep(prefill_s)
            self.watts = watts
            self.sleep(decode_s)
            self.watts = IDLE_WATTS
            phases = {"prefill": prefill_s, "decode": decode_s} if prefill_s else {}
            return Work(emitted_tokens=tokens, prompt_tokens=100 if prefill_s else 0, phases=phases)

        return work


PLAN = Plan(repeats=5, rest_s=3.0, warm_ups=1)


def run_protocol(machine: SimulatedMachine, workloads, plan: Plan = PLAN, load_step=None, keep=lambda _: None) -> RunLog:
    measured = characterise_meter(machine.system, machine, machine.load)
    machine.recorder = Recorder(machine.system, machine)
    machine.recorder.poll()
    return measure(machine.system, machine.recorder, workloads, measured, plan, load_step, keep)


def two_variants(drafted: str = "dense 2") -> RunLog:
    """The log of plain decoding at 12 W for 2 s and of drafting at 14 W for 1 s, 50 tokens each."""
    machine = SimulatedMachine()
    workloads = {"plain": machine.workload(12.0), drafted: machine.workload(14.0, decode_s=1.0)}
    return run_protocol(machine, workloads, Plan(repeats=4, rest_s=1.0))
