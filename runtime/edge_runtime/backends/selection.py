"""The backends there are, which of them can run a bundle, and which was measured to be fastest on this machine.

Only what can run a bundle, by its files and the installed libraries, is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from edge_devices.children import limited_command, print_answer, run_child
from edge_devices.files.user_cache import entry_key
from edge_devices.machine.device_package import how_to_get
from edge_devices.machine.facts import cpu_identity, installed_version
from edge_devices.waiting import Report
from edge_runtime.backends.interface import CPU, Backend, OpenRequest
from edge_runtime.backends.kernels.loader import variant
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.calibration.measured import MeasuredValue
from edge_runtime.errors import BackendError, BundleError, EdgeRuntimeError, RequestError

BackendKind = str
# A backend on the CPU, "llama", or a backend and a device, "llama vulkan0".
BackendChoice = str
# As the name of a device: the fastest there is.
AUTO = "auto"
# As the name of a device: the first of this kind that there is.
KINDS = ("gpu", "npu")


@dataclass(frozen=True, kw_only=True)
class BackendCard:
    """What is known of a backend without its code: its display name, its target's file format, its library's module and package.

    `compiled`: installing the package compiles it.
    """

    title: str
    format: str
    library: str
    package: str
    compiled: bool = False


# A backend is a folder here with an `open.py`, an extra of the package of the same name, and a line; of equals the first is taken.
CARDS: dict[BackendKind, BackendCard] = {
    "llama": BackendCard(title="llama.cpp", format="gguf", library="llama_cpp", package="llama-cpp-python", compiled=True),
    "onnx": BackendCard(title="ONNX Runtime", format="onnx", library="onnxruntime", package="onnxruntime"),
}
BACKENDS = tuple(CARDS)


def backend_of(choice: BackendChoice) -> BackendKind:
    """Returns the backend of a choice."""
    return choice.partition(" ")[0]


def device_of(choice: BackendChoice) -> str | None:
    """Returns the device of a choice; None is the CPU."""
    return choice.partition(" ")[2] or None


def title(choice: BackendChoice) -> str:
    """Returns a choice's name for people: "ONNX Runtime", "llama.cpp on vulkan0"."""
    device = device_of(choice)
    return CARDS[backend_of(choice)].title + (f" on {device}" if device else "")


def load_backend(kind: BackendKind) -> Backend:
    """Imports the code of a backend."""
    backend: Backend = import_module(f"edge_runtime.backends.{kind}.open").BACKEND
    return backend


def usable_backends(bundle: Bundle, requested: BackendKind | None) -> list[BackendKind]:
    """Returns `requested`, or all backends whose files are in the bundle and whose library is installed; at least one.

    Raises RequestError for an unknown backend, BundleError if the bundle has no files for it, BackendError if no library is installed.
    """
    if requested is not None and requested not in BACKENDS:
        raise RequestError(f"backend {requested!r} is unknown; choose one of {', '.join(BACKENDS)}")
    held = [kind for kind, card in CARDS.items() if bundle.has("target", card.format)]
    if requested is not None and requested not in held:
        format = CARDS[requested].format
        raise BundleError(f"{bundle.folder} has no {format} model for the {requested} backend; export it again with --format {format}")
    if not held:
        formats = " nor ".join(card.format for card in CARDS.values())
        raise BundleError(f"{bundle.folder} has neither a {formats} model; export the bundle again")
    candidates = [requested] if requested is not None else held
    usable = [kind for kind in candidates if find_spec(CARDS[kind].library) is not None]
    if usable:
        return usable
    raise BackendError(f"no library is installed that runs {bundle.folder}; {how_to_get(*candidates)}")


def check_device(bundle: Bundle, requested: BackendKind | None, name: str) -> None:
    """Raises RequestError if no usable backend computes on a device of that name here; `cpu` and `auto` are on every machine."""
    if name.lower() in (CPU, AUTO):
        return
    refusals = [load_backend(kind).missing_device(name) for kind in usable_backends(bundle, requested)]
    if all(refusals):
        raise RequestError("; ".join(filter(None, refusals)))


def fitting_backends(request: OpenRequest, requested: BackendKind | None) -> list[BackendKind]:
    """Returns the usable backends that have all options of a request. Raises as `usable_backends` and `check_options` do."""
    usable = usable_backends(request.bundle, requested)
    refusals = {kind: _refusal(kind, request) for kind in usable}
    fitting = [kind for kind, refusal in refusals.items() if refusal is None]
    if not fitting:
        raise RequestError("; ".join(dict.fromkeys(filter(None, refusals.values()))) if request.device else refusals[usable[0]])
    return fitting


def check_options(kind: BackendKind, request: OpenRequest) -> None:
    """Raises RequestError for an option that the backend does not have."""
    if (refusal := _refusal(kind, request)) is not None:
        raise RequestError(refusal)


def _refusal(kind: BackendKind, request: OpenRequest) -> str | None:
    backend, name = load_backend(kind), title(kind)
    if request.sequences > backend.max_sequences:
        count, limit = request.sequences, backend.max_sequences
        return f"{count} sessions at once are more than the {limit} that {name} runs; ask for fewer, or for another backend"
    for option, value in request.special_options().items():
        if option not in backend.options:
            return f"{name} has no {option}, which is {value}; leave it out, or {_others_with(option)}"
    device = request.special_options().get("device")
    return None if device is None else backend.missing_device(str(device))


def has_options(kind: BackendKind, options: Sequence[str], *, sequences: int = 1) -> bool:
    """Whether a backend has these options and runs so many sequences at once."""
    backend = load_backend(kind)
    return backend.options.issuperset(options) and sequences <= backend.max_sequences


def _others_with(option: str) -> str:
    return f"use the {' or '.join(kind for kind in BACKENDS if has_options(kind, [option]))} backend"


@dataclass(frozen=True, kw_only=True)
class BackendRates:
    """Tokens per second, or per joule, to be expected of each backend, or of each device, with the policy's best rounds.

    `bundle` is its folder's name.
    """

    bundle: str
    rates: Mapping[BackendChoice, float]

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be rates of backends."""
        if (
            not self.rates
            or not {backend_of(choice) for choice in self.rates} <= set(BACKENDS)
            or not all(rate > 0 for rate in self.rates.values())
        ):
            raise ValueError(f"{self.rates!r} are not rates of backends")

    @property
    def fastest(self) -> BackendChoice:
        """The backend, or its device, of the highest rate."""
        return max(self.rates, key=self.rates.__getitem__)

    def sentence(self) -> str:
        """What was found, for people."""
        best = self.fastest
        others = [f"{self.rates[best] / rate:.2f} times the speed of {title(other)}" for other, rate in self.rates.items() if other != best]
        return f"{title(best)}, {', '.join(others)}" if others else f"{title(best)}, the only one that opens it"


_RATES = MeasuredValue(kind="backends", value_class=BackendRates, doing="measuring which backend is faster", times=1)


def measured_rates(
    bundle: str,
    facts: Sequence[object],
    choices: Sequence[BackendChoice],
    rate_of: Callable[[BackendChoice], float],
    notify: Callable[[str], None],
) -> BackendRates:
    """Returns the cached rates of the bundle with these facts on this machine; without any, measures each of `choices` by `rate_of`.

    A backend or a device that cannot open the bundle has no rate. Raises its error if that is so of all.
    """

    def measure(_: Report, __: object) -> BackendRates:
        devices = any(" " in choice for choice in choices)
        what = "where the bundle" if devices else "which of the bundle's backends"
        notify(f"Measuring {what} is faster on this machine.")
        rates: dict[BackendChoice, float] = {}
        failure: EdgeRuntimeError | None = None
        for choice in choices:
            try:
                rates[choice] = rate_of(choice)
            except EdgeRuntimeError as error:
                failure = failure or error
                notify(f"{title(choice)} is left out: {error}.")
        if failure is not None and not rates:
            raise failure
        measured = BackendRates(bundle=bundle, rates=rates)
        notify(f"Backend: {measured.sentence()}; {'--device' if devices else '--backend'} takes the other one.")
        return measured

    return _RATES.known_or_measured(_rates_key(facts), measure, notify, fits=lambda known: set(known.rates) <= set(choices))


def kept_rates(facts: Sequence[object], choices: Sequence[BackendChoice]) -> BackendRates | None:
    """Returns the kept rates of the bundle with these facts on this machine; measures nothing."""
    known = _RATES.known(_rates_key(facts), fits=lambda known: set(known.rates) <= set(choices))
    return None if known is None else known.value


def _rates_key(facts: Sequence[object]) -> str:
    libraries = (installed_version(card.package) or "" for card in CARDS.values())
    return entry_key([cpu_identity(), variant(), *libraries, *map(str, facts)])


def cached_choices() -> Iterator[BackendRates]:
    """Returns what was measured on this machine, or on another one with the same cache folder."""
    return (rates for _, rates in _RATES.kept())


# Describes one installed backend in a child process: a build that does not suit the processor dies on loading.
CHILD_COMMAND = limited_command("edge_runtime.backends.selection")
TIMEOUT_SECONDS = 60.0


def ask_backend(
    kind: BackendKind, child_command: Sequence[str] = CHILD_COMMAND, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[str, Any]:
    """Returns what a backend describes of its library (`interface.Backend.describe`), or {"error": a sentence} if it cannot be used.

    Raises BackendError if no child process can be started.
    """
    child = run_child([*child_command, kind], seconds=timeout_seconds, failure=BackendError)
    if isinstance(child.answer.get("error"), str):
        return {"error": child.answer["error"]}
    if child.end is not None or "version" not in child.answer:
        return {"error": f"its library {child.end or 'gave no answer'} when it was loaded"}
    return child.answer


if __name__ == "__main__":
    print_answer(lambda: load_backend(sys.argv[1]).describe())
