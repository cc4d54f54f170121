"""The most memory that a graph's values take at one time, and the check against what there is."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

from edge_devices.files.protobuf_wire import WireError
from edge_devices.machine.memory import available_memory_bytes, byte_text
from edge_runtime.backends.onnx_memory.operator_shapes import Shape, ShapeError, Value, output_values
from edge_runtime.backends.onnx_memory.parsed_graph import Body, Node, parse_graph
from edge_runtime.bundle.integrity import read_part
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.bundle.onnx_graph import MAX_GRAPH_BYTES
from edge_runtime.errors import BackendError, BundleError

# Where the system does not say how much is available.
_UNKNOWN_LIMIT = 8 << 30
_WIDE_INPUTS = {b"input_ids", b"position_ids", b"token", b"draft_length"}


def check_graph_memory(path: Path, *forwards: Mapping[str, Shape]) -> int:
    """Returns the bytes of values that the graph at `path`, which passed `check_onnx`, needs at most, with inputs of any of these shapes.

    Raises BundleError if a shape cannot be computed, BackendError if that is more than the available memory.
    """
    available = available_memory_bytes() or _UNKNOWN_LIMIT
    data = read_part(path, MAX_GRAPH_BYTES, "graph")
    try:
        body = parse_graph(data)
        return max(_Peak(available).of_file(body, {name.encode(): shape for name, shape in shapes.items()}) for shapes in forwards)
    except (ShapeError, WireError) as error:
        raise BundleError(f"{path} is no sound ONNX graph ({error}); copy the bundle again, or do not use it") from error
    except _TooMuchError as error:
        raise BackendError(
            f"{path.name} needs {byte_text(error.needed)} or more for its values, {byte_text(available)} of memory are available;"
            " free some memory or ask for a shorter context"
        ) from error


class _TooMuchError(Exception):
    """More memory than there is."""

    def __init__(self, needed: int) -> None:
        self.needed = needed


class _Peak:
    """Follows the nodes in their order: a value is there from the node that makes it to the last one that reads it.

    Values of constants alone are computed when the graph is opened, and are there as long as it is.
    """

    def __init__(self, available: int) -> None:
        self._available = available
        self._kept = 0
        self._peak = 0

    def of_file(self, body: Body, shapes: Mapping[bytes, Shape]) -> int:
        """Returns the most bytes at a time. Raises ShapeError, _TooMuchError."""
        known: dict[bytes, Value] = {}
        for name, declared in body.inputs.items():
            given = shapes.get(name, ())
            shape = tuple(given[axis] if size is None and axis < len(given) else size for axis, size in enumerate(declared))
            sizes = tuple(size for size in shape if size is not None and size >= 0)
            if len(sizes) < len(declared):
                raise ShapeError(f"the input {name[:80].decode('utf-8', 'replace')!r} is none that the runtime gives")
            known[name] = Value(sizes, wide=name in _WIDE_INPUTS)
            if name not in shapes:  # an array of its own, of the size that the graph says
                self._kept += known[name].bytes
        self._follow(body, known, 0)
        return self._peak

    def _follow(self, body: Body, outer: Mapping[bytes, Value], held: int) -> dict[bytes, Value]:
        """Computes the values of a graph where `held` bytes are taken by others; returns all of them."""
        known = dict(outer)
        for name, tensor in body.constants.items():
            known[name] = Value(tensor.shape, tensor.items, constant=True, wide=tensor.items is not None)
        last = _last_readers(body)
        live = 0
        for place, node in enumerate(body.nodes):
            values = self._outputs(node, known, held + live)
            made = sum(value.bytes for value in values)
            self._take(held + live + made)
            for name, value in zip(node.outputs, values, strict=False):
                known[name] = value
                if value.constant:
                    self._kept += value.bytes
                elif last.get(name, -1) > place:
                    live += value.bytes
            for name in {name for name in _read_by(node) if last.get(name) == place}:
                if name not in outer and name not in body.constants and name in known and not known[name].constant:
                    live -= known[name].bytes
        return known

    def _take(self, held: int) -> None:
        self._peak = max(self._peak, self._kept + held)
        if self._peak > self._available:
            raise _TooMuchError(self._peak)

    def _outputs(self, node: Node, known: Mapping[bytes, Value], held: int) -> list[Value]:
        if node.bodies:
            return self._branches(node, known, held) if node.operator == "If" else self._loop(node, known, held)
        inputs = []
        for name in node.inputs:
            if name and name not in known:
                raise ShapeError(f"{node.operator[:40]} reads {name[:80].decode('utf-8', 'replace')!r}, which nothing before it gives")
            inputs.append(known[name] if name else Value(()))
        while inputs and not node.inputs[len(inputs) - 1]:  # inputs that are left out at the end
            inputs.pop()
        return output_values(node, inputs)

    def _branches(self, node: Node, known: Mapping[bytes, Value], held: int) -> list[Value]:
        given: list[list[Value]] = []
        for body in node.bodies.values():
            values = self._follow(body, known, held)
            given.append(_outputs_of(body, values))
        return [max(pair, key=lambda value: value.bytes) for pair in zip(*given, strict=False)]

    def _loop(self, node: Node, known: Mapping[bytes, Value], held: int) -> list[Value]:
        """A Loop's carried values keep their size; what it collects grows with each of at most MAX_DRAFT_LENGTH iterations."""
        body = node.bodies.get(b"body", Body())
        started = [known.get(name, Value(())) for name in node.inputs[2:]]
        own = dict(known)
        for name, value in zip(body.inputs, [Value(()), Value(()), *started], strict=False):
            own[name] = Value(value.shape, wide=True)
        ended = _outputs_of(body, self._follow(body, own, held + sum(value.bytes for value in started)))[1:]
        carried = ended[: len(started)]
        if any(prod(after.shape) > prod(before.shape) for before, after in zip(started, carried, strict=False)):
            raise ShapeError("a value of a Loop grows with each iteration")
        return [*carried, *(Value((MAX_DRAFT_LENGTH, *value.shape), wide=value.wide) for value in ended[len(started) :])]


def _outputs_of(body: Body, known: Mapping[bytes, Value]) -> list[Value]:
    if missing := [name for name in body.outputs if name not in known]:
        raise ShapeError(f"the output {missing[0][:80].decode('utf-8', 'replace')!r} is given by no node")
    return [known[name] for name in body.outputs]


def _read_by(node: Node) -> set[bytes]:
    """The names that a node and the graphs inside it read."""
    return {*node.inputs, *(name for body in node.bodies.values() for name in (*body.names, *body.outputs))}


def _last_readers(body: Body) -> dict[bytes, int]:
    """The place of the last node that reads each name; outputs are read at the end."""
    last = {name: place for place, node in enumerate(body.nodes) for name in _read_by(node)}
    return last | dict.fromkeys(body.outputs, len(body.nodes))
