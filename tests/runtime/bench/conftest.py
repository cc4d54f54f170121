"""edge-bench run on benchmarks that are played: what measures, on which machine and with which meter is replaced here alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edge_bench.measure import command, conditions
from edge_devices.machine.system import System
from edge_runtime.backends.llama.open import LlamaBackend
from edge_runtime.backends.onnx.open import OrtBackend


class Played:
    """What `edge-bench run` measures, and where."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def benchmark(self, make: Callable[..., Any]) -> None:
        """Has runs measure with what `make` returns of a bundle, a request and load options."""
        self._patch.setattr(command, "Benchmark", make)

    def machine(self, system: System) -> None:
        """Has heat and throttling read from this machine."""
        self._patch.setattr(conditions, "System", lambda: system)

    def meter(self, meter: Any, joules: Callable[..., Any]) -> None:
        """Has runs find this meter, and `joules` measure with it."""
        self._patch.setattr(command, "find_meter", lambda _: (meter, ""))
        self._patch.setattr(command, "measure_joules", joules)

    def any_device(self) -> None:
        """Has this machine have every device."""
        for backend in (LlamaBackend, OrtBackend):
            self._patch.setattr(backend, "missing_device", lambda *_: None)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)
