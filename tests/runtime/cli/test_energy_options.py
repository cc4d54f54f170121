"""What edge-run says of a run's energy, with a meter and without, and --explain."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from click.testing import Result

from chat_words import chat_session
from edge_devices.energy.virtual_meters import EstimateMeter, ReplayMeter
from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, MeterFacts, MeterState, Sample, Scope, Trace, absent, present, usable
from edge_runtime.cli import options as cli_options
from edge_runtime.drafting.cost_model import MAX_ROWS, CostCurve, MeasuredCosts
from edge_runtime.session.session import Session
from scripted import make_session

FAST = 1000.0  # simulated seconds per second; the recorder's own pauses are real ones
FACTS = MeterFacts(name="rails", kind=Kind.COUNTER, scope=Scope.RAILS, source="test", refresh_s=0.05, resolution=1e-6, poll_s=0.002)
WATTS = 5.0


@pytest.fixture(scope="module")
def recording() -> Trace:
    return Trace.of(FACTS, [Sample(step * 0.05, step * 0.05 * WATTS) for step in range(400_000)])


def slowed(session: Session, seconds: float) -> Session:
    """Has each forward of a session take so long."""

    def slow(forward: Any) -> Any:
        return lambda *arguments, **options: (time.sleep(seconds), forward(*arguments, **options))[1]

    session.target.verify, session.target.prefill = slow(session.target.verify), slow(session.target.prefill)  # type: ignore[method-assign]
    return session


@pytest.fixture
def run(command):
    def call(
        *arguments: str,
        name: str = "generate",
        findings: list[Finding],
        session: Session | None = None,
        pause: float = 0.0,
        prompt: str = "abc",
    ) -> Result:
        command.opens(lambda _: slowed(session or make_session(), pause))
        command.finds(findings)
        return command(name, "bundle", prompt, *arguments)

    return call


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch, recording: Trace) -> Finding:
    system = System(clock=lambda: time.perf_counter() * FAST, sleep=lambda s: time.sleep(s / FAST))
    monkeypatch.setattr(cli_options, "System", lambda: system)
    return usable(ReplayMeter(system, recording))


def test_a_run_says_its_joules_per_token_with_interval_and_scope(run: Any, meter: Finding) -> None:
    result = run("--max-tokens", "30", findings=[absent("rapl", "no"), meter], pause=0.003)
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stderr.splitlines() if "J/token" in line)
    assert "[" in line
    assert "scope rails" in line
    assert "(replay:rails)" in line


def test_the_figure_is_that_of_the_meter(run: Any, meter: Finding) -> None:
    begin = time.perf_counter()
    record = json.loads(run("--json", "--max-tokens", "30", findings=[meter], pause=0.003).stdout)
    longest = (time.perf_counter() - begin) * FAST * WATTS / 30
    stats, energy = record["stats"], record["energy"]
    shortest = stats["decode_seconds"] * FAST * WATTS / 30
    assert 0.97 * shortest < energy["joules_per_token"]["value"] < longest
    assert energy["meter"]["scope"] == "rails"
    assert "energy_reason" not in record


def test_a_run_too_short_for_the_meter_has_no_figure_but_a_reason(run: Any, meter: Finding) -> None:
    slow = MeterFacts(**{**vars(FACTS), "refresh_s": 2000.0})
    gauge = ReplayMeter(System(), Trace.of(slow, [Sample(0.0, 0.0), Sample(1e6, 1.0)]))
    record = json.loads(run("--json", findings=[usable(gauge)]).stdout)
    assert record["energy"] is None
    assert "too short" in record["energy_reason"]


def test_a_machine_without_a_meter_needs_no_line_and_is_no_error(run: Any) -> None:
    result = run(findings=[absent("rapl", "this machine has none")])
    assert result.exit_code == 0
    assert "energy" not in result.stderr
    assert "energy" not in result.stdout
    record = json.loads(run("--json", findings=[]).stdout)
    assert record["energy"] is None
    assert record["energy_reason"] == "no energy meter on this machine"


def test_a_meter_can_be_named(run: Any, meter: Finding) -> None:
    denied = present("rapl:package", "only root may read it", "chmod it")
    assert run("--meter", "replay:rails", findings=[denied, meter], pause=0.003).exit_code == 0
    result = run("--meter", "rapl:package", findings=[denied, meter])
    assert (result.exit_code, "only root may read it" in result.stderr) == (1, True)
    assert "no meter 'wall' on this machine" in run("--meter", "wall", findings=[meter]).stderr


def test_a_source_that_is_not_usable_is_not_read(run: Any) -> None:
    assert "no energy meter" in run(findings=[Finding(name="x", state=MeterState.PRESENT, reason="denied")]).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--objective", "energy", "--draft-length", "2"),
        ("--objective", "watts"),
        ("--objective", "time", "--phase-power", "/dev/null"),
    ],
)
def test_contradictions_are_usage_errors(run: Any, arguments: tuple[str, ...]) -> None:
    assert run(*arguments, findings=[]).exit_code == 2


def profiting() -> Session:
    costs = CostCurve(MeasuredCosts(verify=tuple(0.01 + 0.001 * n for n in range(MAX_ROWS)), step=0.0005))
    return make_session(costs=lambda: costs)


def test_explain_says_a_line_about_each_round(run: Any) -> None:
    result = run("--explain", "--max-tokens", "20", findings=[], session=profiting())
    lines = [line for line in result.stderr.splitlines() if line.startswith("  ") or line.startswith(" step")]
    heads = lines[0].split("  ")
    assert [h.strip() for h in heads if h.strip()][:4] == ["step", "mode", "drafted", "checked"]
    rows = [line.split() for line in lines[1:]]
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    assert sum(int(row[7]) for row in rows) == 20
    assert rows[0][1] == "draft"
    assert all(int(row[4]) >= int(row[3]) + 1 for row in rows)
    assert len({len(line[: line.index("draft") + 5]) for line in lines[1:] if "draft" in line}) == 1
    assert len(result.stdout.strip()) > 8


def test_explain_without_profit_says_what_came_of_it(run: Any) -> None:
    rows = [line.split() for line in run("--explain", "--draft-length", "2", findings=[], session=profiting()).stderr.splitlines()]
    first = rows[1]
    assert first[:6] == ["1", "draft", "-", "2", "3", "2"]
    assert first[6] == first[8] == "-"


@pytest.fixture
def chat(command):
    def call(stdin: str, *arguments: str, findings: list[Finding]) -> Result:
        command.opens(lambda _: slowed(chat_session("a long answer " * 3, "another answer " * 3), 0.002))
        command.finds(findings)
        return command("chat", "bundle", *arguments, stdin=stdin)

    return call


def test_a_chat_says_its_joules_per_token_when_asked(chat: Any, meter: Finding) -> None:
    result = chat("hi\nand?\n/stats\n", "--lines", findings=[meter])
    assert result.exit_code == 0, result.output
    last, every = [line for line in result.stderr.splitlines() if line.startswith("energy of")]
    assert last.startswith("energy of the last answer: REPLAYED from a recording of another run: ")
    assert every.startswith("energy of all 2 answers: REPLAYED from a recording of another run: ")
    assert "2 runs together" in every
    assert all("J/token, scope rails, idle power" in line for line in (last, every))
    records = [json.loads(line) for line in chat("hi\n", "--json", findings=[meter]).stdout.splitlines()]
    assert records[0]["energy"]["joules_per_token"]["value"] > 0
    assert records[0]["energy"]["meter"]["scope"] == "rails"


def test_a_chat_without_a_meter_says_so_when_asked(chat: Any) -> None:
    result = chat("hi\n/stats\n", "--lines", findings=[])
    assert result.stderr.count("energy of the last answer: not measured: no energy meter on this machine") == 1
    twice = chat("hi\nand?\n/stats\n", "--lines", findings=[])
    assert twice.stderr.count("not measured: no energy meter on this machine") == 1
    record = json.loads(chat("hi\n", "--json", findings=[]).stdout)
    assert (record["energy"], record["energy_reason"]) == (None, "no energy meter on this machine")


def test_compare_has_joules_of_both_sides(run: Any, meter: Finding) -> None:
    arguments = ("--draft-length", "2", "--max-tokens", "30", "--repeats", "2")
    result = run(*arguments, name="compare", findings=[meter], pause=0.003)
    assert result.exit_code == 0, result.output
    assert "energy, J/token" in result.stdout
    energy = json.loads(run(*arguments, "--json", name="compare", findings=[meter], pause=0.003).stdout)["energy"]
    assert [energy[side]["kind"] for side in ("plain", "drafted")] == ["replayed", "replayed"]


def test_compare_has_joules_of_a_prompt_token(run: Any, meter: Finding) -> None:
    arguments, pause = ("--draft-length", "2", "--max-tokens", "2", "--repeats", "2"), 0.02
    assert re.search(r"energy, J/prompt token +│ +\d.*the same", run(*arguments, name="compare", findings=[meter], pause=pause).stdout)
    begin = time.perf_counter()
    record = json.loads(run(*arguments, "--json", name="compare", findings=[meter], pause=pause).stdout)
    whole = time.perf_counter() - begin
    tokens = record["plain"][0]["prompt_tokens"] - 1
    figure = record["energy"]["prompt"]["joules_per_token"]["value"]
    assert 0.5 * pause < figure * tokens / FAST / WATTS < whole / 4, "that of one prompt, without the rounds"
    alone = run(*arguments, name="compare", findings=[meter], pause=pause, prompt="a")
    assert "energy of the prompt: not measured: no energy figure from replay:rails: this meter saw 0 s of 4 runs" in alone.stderr


def test_compare_takes_the_profiles_watts_where_there_is_no_meter(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--draft-length", "2", "--max-tokens", "30", "--repeats", "2")
    error = 0.05
    monkeypatch.setattr(
        cli_options, "virtual_meter", lambda system, _: EstimateMeter(system, idle_watts=2, core_watts=5, model_error=error)
    )
    estimated = run(*arguments, name="compare", findings=[], pause=0.02)
    assert "J/token, an ESTIMATE" in estimated.stdout
    assert "energy: nothing was measured; model: 2 W idle + 5 W per busy core" in estimated.stderr
    energy = json.loads(run(*arguments, "--json", name="compare", findings=[], pause=0.02).stdout)["energy"]
    assert [energy[side]["kind"] for side in ("plain", "drafted")] == ["estimate", "estimate"]

    error = 0.95
    overlapping = run(*arguments, name="compare", findings=[], pause=0.02)
    assert "not determined" in overlapping.stdout
    assert "nothing was measured, and the ranges of the estimate overlap" in overlapping.stderr
    short = run("--max-tokens", "2", "--repeats", "1", name="compare", findings=[], prompt="a")
    assert "one run each" in short.stdout
    assert "ESTIMATE, nothing was measured: no energy figure" not in short.stderr
    assert "energy of the prompt" not in short.stderr

    def without_watts(*_: object) -> None:
        raise MeterError("the profile x has no watts")

    monkeypatch.setattr(cli_options, "virtual_meter", without_watts)
    none = run(*arguments, name="compare", findings=[])
    assert "J/token" not in none.stdout
    assert "J/prompt token" not in none.stdout
    reason = "energy was not measured: no energy meter on this machine, and no estimate: the profile x has no watts (--meter)"
    assert none.stderr.count(reason) == 1


def test_compare_shows_an_estimate_that_was_asked_for_with_its_range(run: Any) -> None:
    """Watts that somebody typed may be off by all of them, so that both ranges overlap; they asked for them nonetheless."""
    arguments = ("--draft-length", "2", "--max-tokens", "30", "--repeats", "2", "--meter", "estimate:3,4")
    result = run(*arguments, name="compare", findings=[], pause=0.02)
    assert result.exit_code == 0, result.output
    rows = {row[0]: row[1:] for line in result.stdout.splitlines() if len(row := [c.strip() for c in line.strip("│").split("│")]) == 3}
    assert all(re.fullmatch(r"\d[\d.]* \[0\.0+, [\d.]+\]", cell) for cell in rows["J/token, an ESTIMATE"]), rows
    assert "nothing was measured; model: 3 W idle + 4 W per busy core (given), with the range of these watts" in result.stderr


def test_an_estimate_is_only_made_when_asked_for_and_says_so(run: Any) -> None:
    result = run("--meter", "estimate:2,5", "--max-tokens", "60", findings=[], pause=0.02)
    assert result.exit_code == 0, result.output
    assert "ESTIMATE, nothing was measured" in result.stderr
    record = json.loads(run("--meter", "estimate:2,5", "--max-tokens", "60", "--json", findings=[], pause=0.02).stdout)
    assert record["energy"], record["energy_reason"]
    assert record["energy"]["meter"]["estimate"] is True
    refused = run("--meter", "estimate:2", findings=[])
    assert (refused.exit_code, "estimate:IDLE,CORE" in refused.stderr) == (1, True)
