"""What the server says of a request's energy: joules of the machine, per token only where nothing else ran."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs edge-mtp[dev]")
from chat_server import ask, client_of, scripted_server, send
from edge_devices.energy.live import SharedWatch
from edge_devices.machine.system import System
from edge_devices.meters.base import Kind, MeterFacts, Sample, Scope
from polling import wait

FAST, WATTS = 1000.0, 5.0
FACTS = MeterFacts(name="steady", kind=Kind.COUNTER, scope=Scope.PACKAGE, source="test", refresh_s=0.05, resolution=1e-6, poll_s=0.001)


class Steady:
    facts = FACTS

    def __init__(self, system: System) -> None:
        self._system = system

    def read(self) -> Sample:
        now = self._system.clock()
        return Sample(now, WATTS * now)


@pytest.fixture
def watch():
    system = System(clock=lambda: time.perf_counter() * FAST)
    watch = SharedWatch(system, Steady(system))
    yield watch
    watch.close()


def test_a_request_alone_has_joules_per_token_with_interval_scope_and_meter(watch) -> None:
    with scripted_server("a long answer " * 4, watch=watch) as server:
        server.batch.before_forward = lambda: time.sleep(0.002)
        usage = ask(client_of(server)).usage
        chunks = list(ask(client_of(server), stream=True, stream_options={"include_usage": True}))
    energy = usage.energy
    assert (energy["scope"], energy["meter"], energy["shared_with"], energy["estimate"]) == ("package", "steady", 0, False)
    assert energy["joules"] > 5
    assert energy["joules_per_token"] == pytest.approx(energy["joules"] / usage.completion_tokens)
    low, high = energy["joules_per_token_interval"]
    assert low <= energy["joules_per_token"] <= high
    assert chunks[-1].usage.energy["joules"] > 5


def test_requests_at_once_have_the_machines_joules_and_say_so(watch) -> None:
    answers: list[Any] = []
    met = threading.Event()
    with scripted_server("a long answer " * 10, count=2, watch=watch) as server:

        def forward() -> None:
            if not met.is_set():
                assert wait(lambda: sum(server.worker.load()) == 2)
                met.set()
            time.sleep(0.003)

        server.batch.before_forward = forward
        threads = [threading.Thread(target=lambda: answers.append(ask(client_of(server)))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for answer in answers:
        energy = answer.usage.energy
        assert energy["shared_with"] == 1
        assert energy["joules"] > 5
        assert energy["joules_per_token"] is None
        assert "not split" in energy["reason"]


def test_metrics_have_the_joules_of_all_requests(watch) -> None:
    with scripted_server("a long answer " * 4, watch=watch) as server:
        server.batch.before_forward = lambda: time.sleep(0.002)
        before = send(server, "GET", "/energy_metrics")
        joules = sum(ask(client_of(server)).usage.energy["joules"] for _ in range(2))
        status, _, after = send(server, "GET", "/energy_metrics")
        scraped = send(server, "GET", "/metrics")[2].decode()
    assert (before[0], before[2]["total_energy_j"], status) == (200, 0.0, 200)
    assert after["total_energy_j"] == pytest.approx(joules, rel=0.05)
    assert after["query_time"] > before[2]["query_time"]
    assert (after["meter"], after["scope"], after["estimate"]) == ("steady", "package", False)
    low, high = after["joules_interval"]
    assert low <= after["total_energy_j"] <= high
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in scraped.splitlines() if not line.startswith("#")}
    labels = 'meter="steady",scope="package",bound="value"'
    assert values[f"edge_mtp_energy_joules{{{labels}}}"] == pytest.approx(joules, rel=0.05)
    assert values[f"edge_mtp_energy_joules_per_token{{{labels}}}"] > 0


def test_without_a_meter_the_reason_is_given_once_and_no_response_speaks_of_it() -> None:
    watch = SharedWatch(System(), None, "no energy meter here")
    with scripted_server("hello", watch=watch) as server:
        usage = ask(client_of(server)).usage
        chunks = list(ask(client_of(server), stream=True, stream_options={"include_usage": True}))
        response = client_of(server).responses.create(model="scripted", input="hi").usage
        scraped = send(server, "GET", "/metrics")[2].decode()
        status, _, body = send(server, "GET", "/energy_metrics")
        assert (status, body) == (503, {"error": "no energy meter here"})
    watch.close()
    for each in (usage, chunks[-1].usage, response):
        assert "energy" not in each.model_dump()
    assert 'edge_mtp_energy_info{kind="none",reason="no energy meter here"} 1' in scraped
    with scripted_server("hello") as server:
        status, _, body = send(server, "GET", "/energy_metrics")
    assert (status, "reads no energy meter" in body["error"]) == (503, True)
