"""Where the encoders of images and sound run beside a device: there, if the rows are the CPU's, and if that is faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_devices.files.user_cache import entry_key
from edge_devices.machine.facts import installed_version
from edge_runtime.backends.onnx.device_graph import with_products
from edge_runtime.backends.onnx.devices import library_version
from edge_runtime.backends.onnx.loader import Graph, SessionOptions
from edge_runtime.bundle.integrity import read_part
from edge_runtime.bundle.onnx_file import MAX_GRAPH_BYTES, read_graph, with_graph
from edge_runtime.calibration.measured import MeasuredValue
from edge_runtime.errors import BackendError

Rows = NDArray[np.float32]
# How far rows may be from the CPU's, as a share of their norm: what an export allows beside transformers, of weights that are not rounded.
_LIMIT = 0.001


@dataclass(frozen=True, kw_only=True)
class EncoderPlace:
    """Seconds of an encoder on the device and on the CPU, and how far apart its rows are, as a share of their norm.

    Or what failed, and whether that may pass.
    """

    on_device: float = 0.0
    on_processor: float = 0.0
    distance: float = 0.0
    failure: str = ""
    passing: bool = False

    @property
    def is_right(self) -> bool:
        """Whether the device computes what the CPU does."""
        return not self.failure and self.distance <= _LIMIT

    def sentence(self, kind: str, device: str) -> str:
        """Where media of this kind are encoded beside a target on `device`, and why."""
        if self.failure:
            return f"The encoder of {kind} runs on the CPU, since it does not run on {device}: {self.failure}."
        if not self.is_right:
            return f"The encoder of {kind} runs on the CPU: rows of {device} are {self.distance:.2g} off, at most {_LIMIT} is allowed."
        times = f"{self.on_device:.3g} s there, {self.on_processor:.3g} s on the CPU, {self.distance:.1g} apart"
        return f"The encoder of {kind} was tried on {device}: {times}; the faster one is taken."


PLACES = MeasuredValue(
    kind="encoder-place",
    value_class=EncoderPlace,
    doing="comparing an encoder on the device with the CPU",
    times=1,
    disturbed_by_load=lambda place: place.is_right,
    passing=lambda place: place.passing,
)


def runs_on_device(
    path: Path, identity: str, options: SessionOptions, kind: str, rows_on: Callable[[SessionOptions], Callable[[], Rows]]
) -> tuple[bool, str]:
    """Returns whether the encoder at `path` belongs on the device of `options`, and a sentence if that was measured now.

    `rows_on` opens it, and returns what encodes a sample.
    """
    device, sentences = options.device, list[str]()

    def measure(*_: object) -> EncoderPlace:
        place = _compared(rows_on, options)
        sentences.append(place.sentence(kind, device.name))
        return place

    facts = (identity, path.name, device.name, device.hardware, device.driver, library_version(), installed_version("edge-mtp"))
    place = PLACES.known_or_measured(entry_key([*map(str, facts), str(options.threads)]), measure, lambda _: None)
    return place.is_right and place.on_device < place.on_processor, "".join(sentences)


def _compared(rows_on: Callable[[SessionOptions], Callable[[], Rows]], options: SessionOptions) -> EncoderPlace:
    expected, on_processor = _timed(rows_on(SessionOptions(threads=options.threads)))  # freed before the device's is opened
    try:
        rows, on_device = _timed(rows_on(options))
    except BackendError as error:
        return EncoderPlace(failure=str(error), passing=True)  # memory may be free later
    distance = float(np.sqrt(np.square(rows - expected).sum() / np.square(expected).sum()))
    if not np.isfinite(distance):
        return EncoderPlace(failure="its rows hold NaN")
    return EncoderPlace(on_device=on_device, on_processor=on_processor, distance=distance)


def _timed(encode: Callable[[], Rows]) -> tuple[Rows, float]:
    encode()  # a device compiles shaders, the CPU reads weights and takes memory
    start = time.perf_counter()
    rows = encode()
    return rows, time.perf_counter() - start


def device_encoder(path: Path, options: SessionOptions) -> Graph:
    """Opens an encoder's graph on a device, with Gemm in the place of products that only the CPU has. Raises BackendError."""
    model = read_part(path, MAX_GRAPH_BYTES, "graph")
    graph = read_graph(model)
    try:
        graph.nodes = with_products(graph, graph.nodes)
    except (LookupError, ValueError) as error:  # a product of a stranger, with other inputs or outputs
        raise BackendError(f"{path.name} has products with other inputs or outputs than an export's; export the bundle again") from error
    return Graph(path, options, with_graph(model, graph, None))
