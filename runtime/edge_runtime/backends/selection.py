"""Which backends exist, which of them can run a bundle, and which was measured to be the fastest on this machine.

A backend is imported only if the bundle has files for it and its library is installed.
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
from edge_devices.machine.device_package import how_to_get, installed_version
from edge_devices.machine.processors import cpu_identity
from edge_devices.waiting import Report
from edge_runtime.backends.interface import CPU, Backend, OpenRequest
from edge_runtime.backends.kernels.loader import variant
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.calibration.measured import MeasuredValue
from edge_runtime.errors import BackendError, BundleError, EdgeRuntimeError, RequestError

BackendKind = str
# A backend on the CPU ("llama"), or a backend and a device ("llama vulkan0").
BackendChoice = str
# Accepted instead of a device's name: the fastest device of the machine, or its first one of a kind.
AUTO = "auto"
KINDS = ("gpu", "npu")


@dataclass(frozen=True, kw_only=True)
class BackendCard:
    """Facts about a backend that need no import of its code.

    `title` is its display name, `format` the file format of the target, `library` the module to import, `package` the package to
    install. `compiled`: the package is compiled when it is installed.
    """

    title: str
    format: str
    library: str
    package: str
    compiled: bool = False


# To add a backend: a folder here with an `open.py`, an extra of the same name in pyproject.toml, and a line here. Where several fit a
# bundle equally well, the first one is taken.
CARDS: dict[BackendKind, BackendCard] = {
    "llama": BackendCard(title="llama.cpp", format="gguf", library="llama_cpp", package="llama-cpp-python", compiled=True),
    "onnx": BackendCard(title="ONNX Runtime", format="onnx", library="onnxruntime", package="onnxruntime"),
}
BACKENDS = tuple(CARDS)


def backend_of(choice: BackendChoice) -> BackendKind:
    """Returns the backend of a choice."""
    return choice.partition(" ")[0]


def device_of(choice: BackendChoice) -> str | None:
    """Returns the device of a choice; None stands for the CPU."""
    return choice.partition(" ")[2] or None


def title(choice: BackendChoice) -> str:
    """Returns a choice's display name: "ONNX Runtime", "llama.cpp on vulkan0"."""
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
    present = [kind for kind, card in CARDS.items() if bundle.has("target", card.format)]
    if requested is not None and requested not in present:
        format = CARDS[requested].format
        raise BundleError(f"{bundle.folder} has no {format} model for the {requested} backend; export it again with --format {format}")
    if not present:
        formats = " nor ".join(card.format for card in CARDS.values())
        raise BundleError(f"{bundle.folder} has neither a {formats} model; export the bundle again")
    candidates = [requested] if requested is not None else present
    usable = [kind for kind in candidates if find_spec(CARDS[kind].library) is not None]
    if usable:
        return usable
    raise BackendError(f"no library is installed that runs {bundle.folder}; {how_to_get(*candidates)}")


def check_device(bundle: Bundle, requested: BackendKind | None, name: str) -> None:
    """Raises RequestError if no usable backend finds a device of that name on this machine; `cpu` and `auto` always pass."""
    if name.lower() in (CPU, AUTO):
        return
    refusals = [load_backend(kind).missing_device(name) for kind in usable_backends(bundle, requested)]
    if all(refusals):
        raise RequestError("; ".join(filter(None, refusals)))


def fitting_backends(request: OpenRequest, requested: BackendKind | None) -> list[BackendKind]:
    """Returns the usable backends that support all options of a request. Raises as `usable_backends` and `check_options` do."""
    usable = usable_backends(request.bundle, requested)
    refusals = {kind: _refusal(kind, request) for kind in usable}
    fitting = [kind for kind, refusal in refusals.items() if refusal is None]
    if not fitting:
        raise RequestError("; ".join(dict.fromkeys(filter(None, refusals.values()))) if request.device else refusals[usable[0]])
    return fitting


def check_options(kind: BackendKind, request: OpenRequest) -> None:
    """Raises RequestError if the backend does not support an option of the request."""
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
    """Whether a backend supports these options and this number of simultaneous sequences."""
    backend = load_backend(kind)
    return backend.options.issuperset(options) and sequences <= backend.max_sequences


def _others_with(option: str) -> str:
    return f"use the {' or '.join(kind for kind in BACKENDS if has_options(kind, [option]))} backend"


@dataclass(frozen=True, kw_only=True)
class BackendRates:
    """The expected tokens per second, or per joule, of each backend or device, at the policy's best draft length.

    `bundle` is the name of the bundle's folder.
    """

    bundle: str
    rates: Mapping[BackendChoice, float]

    def __post_init__(self) -> None:
        """Raises ValueError unless there are rates, all are of known backends, and all are positive."""
        if (
            not self.rates
            or not {backend_of(choice) for choice in self.rates} <= set(BACKENDS)
            or not all(rate > 0 for rate in self.rates.values())
        ):
            raise ValueError(f"{self.rates!r} are not rates of backends")

    @property
    def fastest(self) -> BackendChoice:
        """The backend or device with the highest rate."""
        return max(self.rates, key=self.rates.__getitem__)

    def sentence(self) -> str:
        """Returns the comparison in words."""
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
    """Returns the rates that are cached for these facts on this machine. If there are none, measures each of `choices` by `rate_of`.

    A choice that cannot open the bundle is left out. If all fail, the first error is raised.
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
    """Returns the rates that are cached for these facts on this machine, or None; measures nothing."""
    known = _RATES.known(_rates_key(facts), fits=lambda known: set(known.rates) <= set(choices))
    return None if known is None else known.value


def _rates_key(facts: Sequence[object]) -> str:
    libraries = (installed_version(card.package) or "" for card in CARDS.values())
    return entry_key([cpu_identity(), variant(), *libraries, *map(str, facts)])


def cached_choices() -> Iterator[BackendRates]:
    """Returns all cached rates, also those of other machines that share the cache folder."""
    return (rates for _, rates in _RATES.kept())


# A child process describes an installed backend: a build for another processor may crash when it is loaded.
CHILD_COMMAND = limited_command("edge_runtime.backends.selection")
TIMEOUT_SECONDS = 60.0


def ask_backend(
    kind: BackendKind, child_command: Sequence[str] = CHILD_COMMAND, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[str, Any]:
    """Returns a backend's description of its library (`interface.Backend.describe`), or {"error": a sentence} if it cannot be used.

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
