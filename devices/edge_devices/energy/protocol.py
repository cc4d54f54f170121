"""A measurement from start to end: checks, meter characterisation, idle, warm-up, interleaved repeats, idle again."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean

from edge_devices.energy.recorder import FLAT_SHARE, Characteristics, Recorder, change_times, characterise, unsettled_share
from edge_devices.energy.run_log import LoggedRun, RunLog
from edge_devices.energy.windows import FAST, measure_window
from edge_devices.errors import MeasurementError
from edge_devices.machine.detection import environment
from edge_devices.machine.processors import LoadWatch
from edge_devices.machine.state import read_state, refusals, warnings
from edge_devices.machine.system import System
from edge_devices.meters.base import Kind, Meter, Scope, Trace
from edge_devices.waiting import Report, no_report

BLOCK = bytes(1 << 20)  # hashing blocks of this size releases the GIL, so each thread keeps a core busy


@contextmanager
def busy_load(threads: int = 1) -> Iterator[None]:
    """Keeps `threads` processors busy inside the block."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            hashlib.sha256(BLOCK).digest()

    workers = [threading.Thread(target=work, name=f"busy-load-{i}", daemon=True) for i in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        ended.set()
        for worker in workers:
            worker.join()


TOGGLES = 3
WINDOW_MARGIN = 1.2  # planned / shortest window: an external meter or a second characterisation may need longer ones
# The machine is steady if this number of windows in a row agree: within these shares of power and speed, and these degrees.
SOAK_WINDOWS, SOAK_WATTS, SOAK_SPEED, SOAK_CELSIUS = 3, 0.03, 0.02, 1.0
MAX_SOAK_S = 600.0
HALF_REFRESHES, MAX_CHARACTERISE_S = 3, 900.0  # new values per load or rest; seconds, as a slower meter would need hours for a session
LENGTHENED, HOLD_GROWTH = 1.5, 1.1  # growth of the load's time: for another try, and between checks of a load that is held
# Seconds of load and rest for an external meter. All lengths differ, so that the steps fit its recording at only one offset.
LOAD_STEPS_S, SLOW_LOAD_STEPS_S = ((3.0, 4.0), (5.0, 2.0), (8.0, 6.0)), ((20.0, 30.0), (40.0, 25.0), (60.0, 50.0))
FAST_REFRESH_S, SLOW_REFRESH_S = 1.0, 10.0  # refresh of meters that show each step in at least two rows


@dataclass(frozen=True, kw_only=True)
class Work:
    """The result of one call of a workload: tokens, requests, and seconds per phase."""

    emitted_tokens: int
    prompt_tokens: int = 0
    requests: int = 1
    phases: Mapping[str, float] = field(default_factory=dict)


Workload = Callable[[], Work]


@dataclass(frozen=True)
class PhaseLoop:
    """A loop of a single phase. `prepare` runs before each window, so that the window measures only `work`."""

    prepare: Callable[[], None]
    work: Workload

    def __call__(self) -> Work:
        return self.work()


def _prepare(workload: Workload) -> None:
    if isinstance(workload, PhaseLoop):
        workload.prepare()


Load = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to measure.

    If `window_s` is None, a window is a fifth longer than the meter needs. With `soak`, the warm-up lasts until power, speed and
    temperature are steady or `max_soak_s` is over, but at least three windows.
    """

    repeats: int = 10
    window_s: float | None = None
    warm_ups: int = 2
    rest_s: float = 5.0
    soak: bool = True
    max_soak_s: float = MAX_SOAK_S


def characterise_meter(system: System, meter: Meter, load: Load, report: Report = no_report) -> Characteristics:
    """Measures a meter's characteristics: polls it as fast as it allows while a light load goes on and off.

    It takes a few seconds, or one to two minutes with a slow meter. A meter that is slower than its facts say is polled again, with loads
    that last for three of its new values, until it has shown eight. If a meter averages over a long time, the load is held until the
    readings are flat in the second half of the step; then the meter is polled again with loads of this length. Raises MeasurementError if
    this would take more than 15 minutes.
    """
    facts, begin = meter.facts, system.clock()
    half_s = max(0.5 if facts.kind is Kind.COUNTER else 3.0, 5 * facts.refresh_s, 2 * facts.lag_s)
    while True:
        left_s = begin + MAX_CHARACTERISE_S - system.clock()
        toggled = _toggled(system, meter, load, half_s, left_s / (2 * TOGGLES + 1), report)
        unsettled = _unsettled(toggled)
        try:
            measured = toggled.characteristics()
            slowest_s = measured.refresh_s
        except MeasurementError:
            measured, slowest_s = None, toggled.seconds / max(1, len(change_times(toggled.trace)))
        needed_s = max(HALF_REFRESHES * slowest_s, toggled.held_s, LENGTHENED * half_s if unsettled else 0.0)
        late = system.clock() - begin + 2 * TOGGLES * needed_s > MAX_CHARACTERISE_S
        if measured is not None and not unsettled and (late or half_s >= needed_s):
            return measured
        if late:
            toggled.characteristics()  # raises its own error if there were too few values
            raise MeasurementError(
                f"{facts.name} {unsettled} a load of {max(half_s, toggled.held_s):.0f} s, so its lag is not known; use another meter"
            )
        half_s = needed_s


@dataclass(frozen=True, kw_only=True)
class _Toggled:
    """The readings while the load went on and off.

    `steps` are the times at which the load changed, `reads` the number of readings, `read_s` the seconds of each. `held_s` is how long the
    first load was held until its readings were flat, if it was held longer than planned, else 0.
    """

    trace: Trace
    steps: list[float]
    reads: int
    read_s: float
    seconds: float
    held_s: float

    def characteristics(self) -> Characteristics:
        return characterise(self.trace, self.steps, reads=self.reads, read_s=self.read_s)


def _unsettled(toggled: _Toggled) -> str:
    """Returns why a meter's readings do not settle within a step, as a part of a sentence, or "" if they do.

    A counter always settles, because it has no lag. A graphics board may show no step, because it does not show the processor's load.
    """
    facts = toggled.trace.facts
    if facts.kind is Kind.COUNTER:
        return ""
    share = unsettled_share(toggled.trace, toggled.steps) if toggled.trace.times else None
    if share is None:
        return "" if facts.scope is Scope.GPU else "does not show"
    return f"still changes, by {share:.0%} of the step, in the last quarter of" if share > FLAT_SHARE else ""


def _toggled(system: System, meter: Meter, load: Load, half_s: float, longest_s: float, report: Report) -> _Toggled:
    """Polls while the load goes on and off three times.

    The first load is held until its readings are flat, but at most for `longest_s`. If it is held longer than `half_s`, it is the only one,
    because readings after further steps would still be mixed with those from before.
    """
    facts, started = meter.facts, system.clock()
    interval_s = min(facts.refresh_s, half_s / HALF_REFRESHES) / 8
    trace, steps, reads, reading_s, held_s = Trace(facts=facts), list[float](), 0, 0.0, 0.0

    def so_far() -> _Toggled:
        return _Toggled(trace=trace, steps=steps, reads=reads, read_s=reading_s / reads, seconds=system.clock() - started, held_s=held_s)

    for half in range(2 * TOGGLES):
        begin, length_s = system.clock(), half_s
        report(half / (2 * TOGGLES), f"how fast the meter is, {2 * TOGGLES * half_s:.0f} s")
        if half:
            steps.append(begin)
        with load() if half % 2 else nullcontext():
            while True:
                before = system.clock()
                sample = meter.read()
                reading_s += system.clock() - before
                reads += 1
                if sample:
                    trace.add(sample)
                if interval_s > 1e-3:
                    system.sleep(interval_s)
                if system.clock() < begin + length_s:
                    continue
                if half != 1 or length_s * HOLD_GROWTH > longest_s or not _unsettled(so_far()):
                    break
                length_s *= HOLD_GROWTH
                held_s = length_s
        if held_s:
            break
    return so_far()


def planned_seconds(plan: Plan, workloads: Mapping[str, Workload], characteristics: Characteristics) -> float:
    """Returns the approximate seconds of a measurement, after the meter is characterised."""
    window_s = _window_seconds(plan, characteristics) + characteristics.lead_in_s
    runs = plan.repeats * len(workloads) * (window_s + plan.rest_s)
    return 2 * characteristics.shortest_idle_s + plan.soak * soak_seconds(plan, characteristics) + runs


def soak_seconds(plan: Plan, characteristics: Characteristics) -> float:
    """Returns the minimum seconds of the warm-up."""
    return SOAK_WINDOWS * (_window_seconds(plan, characteristics) + characteristics.lead_in_s)


def load_steps(refresh_s: float) -> Sequence[tuple[float, float]]:
    """Returns pairs of seconds of load and rest, which are long enough to be visible on a meter with this refresh."""
    longer = max(1.0, refresh_s / SLOW_REFRESH_S)
    return LOAD_STEPS_S if refresh_s <= FAST_REFRESH_S else [(load_s * longer, rest_s * longer) for load_s, rest_s in SLOW_LOAD_STEPS_S]


def _window_seconds(plan: Plan, characteristics: Characteristics) -> float:
    return plan.window_s or WINDOW_MARGIN * characteristics.shortest_measured_s


def measure(
    system: System,
    recorder: Recorder,
    workloads: Mapping[str, Workload],
    characteristics: Characteristics,
    plan: Plan = Plan(),
    load_step: Load | None = None,
    keep: Callable[[RunLog], None] = lambda _: None,
    report: Report = no_report,
    steps_seen: Callable[[Sequence[tuple[float, float]]], None] = lambda _: None,
) -> RunLog:
    """Measures every workload `plan.repeats` times between two idle windows.

    The workloads take turns, and every second round is in reverse order. The recorder must be running. `load_step` is a plain load that
    marks times on an external meter's recording; `steps_seen` gets its time spans before the runs. `keep` gets the log after every window.
    `report` gets each step with the share of the planned seconds that is over. If the meter failed during all windows of a round, the
    measurement ends early with the data so far. Raises MeasurementError if the machine's state does not allow a measurement.
    """
    facts = recorder.trace.facts
    state = read_state(system)
    refused = refusals(state, at_battery=facts.scope is Scope.DEVICE)
    if refused:
        raise MeasurementError("; ".join(refusal.sentence for refusal in refused))
    window_s, idle_s = _window_seconds(plan, characteristics), characteristics.shortest_idle_s
    begin, planned_s, load = system.clock(), planned_seconds(plan, workloads, characteristics), LoadWatch()
    later_s = 0.0  # how much later than planned the measurement will end

    def announce(step: str) -> None:
        report(min(0.99, (system.clock() - begin) / (planned_s + later_s)), step)

    log = RunLog(
        facts=facts,
        characteristics=characteristics,
        trace=recorder.trace,
        environment=environment(system),
        faults=recorder.faults,
        warnings=warnings(state),
    )
    if load_step:
        steps = load_steps(characteristics.refresh_s)
        system.sleep(steps[0][1])
        for number, (load_s, rest_s) in enumerate(steps, start=1):
            announce(f"load step {number} of {len(steps)}, {load_s:.0f} s: the external meter must show more watts now")
            log.loads.append(_load(system, load_step, load_s))
            system.sleep(rest_s)
        steps_seen(log.loads)
    announce(f"idle, {idle_s:.0f} s")
    quiet = LoadWatch()
    log.idles.append(_idle(system, recorder, characteristics))
    if (before := quiet.load()).is_busy:
        log.warnings.append(f"in the idle window before the first run, {before.words()}")
    keep(log)
    announce("warm-up")
    for workload in workloads.values():
        _prepare(workload)
        for _ in range(plan.warm_ups):
            workload()
    announce(f"warm-up until power, speed and temperature are steady, {SOAK_WINDOWS} times {window_s:.0f} s to {plan.max_soak_s:.0f} s")
    soaking = system.clock()
    if plan.soak and workloads and not _soak(system, recorder, next(iter(workloads.values())), log, plan):
        log.warnings.append(f"power, speed and temperature were not steady within {system.clock() - soaking:.0f} s")
    later_s = max(0.0, system.clock() - soaking - soak_seconds(plan, characteristics))
    for repeat in range(plan.repeats):
        names = list(workloads)
        for name in names if repeat % 2 == 0 else reversed(names):
            announce(f"{name}, {window_s:.0f} s, repeat {repeat + 1} of {plan.repeats}")
            log.runs.append(_run(system, recorder, name, repeat, workloads[name], window_s, log))
            keep(log)
            system.sleep(plan.rest_s)
        windows = [(run.start_s, run.end_s) for run in log.runs[-len(names) :]]
        failed = names and all(any(start_s <= time_s <= end_s for time_s, _ in log.faults) for start_s, end_s in windows)
        if failed and (not recorder.trace.times or recorder.trace.times[-1] < windows[-1][1]):  # it has not answered since
            log.warnings.append(f"stopped after {repeat + 1} of {plan.repeats} repeats: {log.faults[-1][1]}")
            keep(log)
            return log
    announce(f"idle again, {idle_s:.0f} s")
    log.idles.append(_idle(system, recorder, characteristics))
    log.others.append(load.load())
    keep(log)
    return log


def _load(system: System, load_step: Load, seconds: float) -> tuple[float, float]:
    begin = system.clock()
    with load_step():
        system.sleep(seconds)
        return begin, system.clock()


def _idle(system: System, recorder: Recorder, characteristics: Characteristics) -> tuple[float, float]:
    begin = recorder.mark()
    system.sleep(characteristics.shortest_idle_s)
    return begin, recorder.mark()


def _run(system: System, recorder: Recorder, name: str, repeat: int, workload: Workload, window_s: float, log: RunLog) -> LoggedRun:
    """Repeats one workload for the meter's lead-in, and then until the window is full.

    The same work runs during the lead-in, because otherwise the window would always lose its first prefill to the lead-in. The expected
    time is from earlier runs of the variant.
    """
    _prepare(workload)
    before = read_state(system)
    lead_in_s, begin = log.characteristics.lead_in_s, system.clock()
    while lead_in_s * FAST > window_s and system.clock() - begin < lead_in_s:
        workload()
    start_s = recorder.mark()
    lead_s, done = start_s - begin, [workload()]
    while system.clock() - start_s < window_s:
        done.append(workload())
    end_s = recorder.mark()
    earlier = [r.seconds / r.requests for r in log.runs if r.variant == name and r.requests]
    requests = sum(w.requests for w in done)
    phases: dict[str, float] = {}
    for work in done:
        for phase, seconds in work.phases.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    return LoggedRun(
        variant=name,
        repeat=repeat,
        start_s=start_s,
        end_s=end_s,
        emitted_tokens=sum(w.emitted_tokens for w in done),
        prompt_tokens=sum(w.prompt_tokens for w in done),
        requests=requests,
        phases=phases,
        expected_s=fmean(earlier) * requests if earlier else None,
        lead_s=lead_s,
        before=before,
        after=read_state(system),
    )


def _soak(system: System, recorder: Recorder, workload: Workload, log: RunLog, plan: Plan) -> bool:
    """Runs a workload until three windows in a row agree in watts (3 %), tokens per second (2 %) and temperature (1 °C)."""
    begin, window_s = system.clock(), _window_seconds(plan, log.characteristics)
    windows: list[tuple[float, float, float]] = []
    while len(windows) < SOAK_WINDOWS or system.clock() - begin < plan.max_soak_s:
        run = _run(system, recorder, "soak", len(windows), workload, window_s, log)
        # An external meter's readings are known only later, so only speed and temperature are compared.
        try:
            of_run = run.start_s, run.end_s, log.characteristics, run.lead_s
            watts = measure_window(recorder.trace, *of_run).watts if recorder.trace.times else 0.0
        except MeasurementError:
            return False
        windows.append((watts, run.emitted_tokens / run.seconds, run.after.temperature_c or 0.0))
        powers, speeds, degrees = zip(*windows[-SOAK_WINDOWS:], strict=True)
        still = max(powers) - min(powers) <= SOAK_WATTS * max(powers) and max(speeds) - min(speeds) <= SOAK_SPEED * max(speeds)
        if len(windows) >= SOAK_WINDOWS and still and max(degrees) - min(degrees) <= SOAK_CELSIUS:
            return True
    return False
