"""Changes of graphs and manifests by what they mean: the result is sound as a file, and its parts do not fit together."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from fuzzing.mutation import TEXTS

# TensorProto.DataType: bytes of an element.
_TYPES = {1: 4, 2: 1, 3: 1, 6: 4, 7: 8, 10: 2, 11: 8}
_SIZES: tuple[Callable[[int], int], ...] = (
    lambda size: size * 2,
    lambda size: size // 2,
    lambda size: size + 1,
    lambda size: max(size - 1, 0),
    lambda _: 0,
    lambda _: 1,
    lambda size: size * 128,
)
_NUMBERS: tuple[Callable[[float], float], ...] = (
    *_SIZES,
    lambda _: -1,
    lambda _: 4096,
    lambda _: 65536,
    lambda _: 1 << 28,
    lambda _: 1 << 40,
    lambda _: (1 << 53) - 1,
)


def changed_graph(data: bytes, chance: random.Random) -> bytes:
    """Returns an ONNX model with other types and shapes of weights, other attributes or fewer, or values in each other's place.

    Weights in a file of their own stay inside of it.
    """
    import onnx

    model = onnx.load_from_string(data)
    graphs = [*_graphs(model.graph)]
    tensors = [tensor for graph in graphs for tensor in graph.initializer]
    nodes = [node for graph in graphs for node in graph.node]
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        act, tensor = chance.randrange(7), chance.choice(tensors)
        if act == 0:
            _retype(tensor, chance.choice([*_TYPES]))
        elif act == 1 and tensor.dims:
            place = chance.randrange(len(tensor.dims))
            tensor.dims[place] = chance.choice(_SIZES)(tensor.dims[place])
            _retype(tensor, tensor.data_type)
        elif act == 2:
            other = chance.choice(tensors)
            tensor.name, other.name = other.name, tensor.name
        elif act == 3:
            _change_attribute(chance.choice(nodes), chance)
        elif act == 4:
            node = chance.choice(nodes)
            if node.input:
                node.input[chance.randrange(len(node.input))] = tensor.name
        elif act == 5:
            dims = list(tensor.dims)
            chance.shuffle(dims)
            del tensor.dims[:]
            tensor.dims.extend(dims)
        else:
            node = chance.choice(nodes)
            parts = chance.choice((node.input, node.output, node.attribute))
            del parts[chance.randrange(len(parts) + 1) :]
    return bytes(model.SerializeToString())


def _graphs(graph: Any) -> Iterator[Any]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _retype(tensor: Any, kind: int) -> None:
    """Gives a tensor this type, and as many bytes as its elements then take."""
    size = _TYPES.get(kind, 4)
    for length in tensor.dims:
        size *= length
    tensor.data_type = kind
    for entry in tensor.external_data:
        if entry.key == "length":
            entry.value = str(size)
    if tensor.raw_data:
        tensor.raw_data = tensor.raw_data[:size].ljust(size if size < 1 << 20 else 0, b"\0")


def _change_attribute(node: Any, chance: random.Random) -> None:
    numbers = [attribute for attribute in node.attribute if attribute.type in (1, 2)]
    if numbers:
        attribute = chance.choice(numbers)
        if attribute.type == 2:
            attribute.i = int(chance.choice(_NUMBERS)(attribute.i))
        else:
            attribute.f = float(chance.choice((0.0, -1.0, 1e30, float("nan"), attribute.f * 2)))


def changed_manifest(data: bytes, chance: random.Random) -> bytes:
    """Returns a manifest with numbers that may be elsewhere, or are too large, names of others or none, and lists of another length."""
    manifest = json.loads(data)
    parts = [name for name in ("architecture", "cache_layout", "onnx", "runtime", "static", "media", "generation") if manifest.get(name)]
    for _ in range(chance.choice((1, 1, 2))):
        name = chance.choice(parts)
        places = [*_places(manifest[name])]
        holder, key = chance.choice(places)
        holder[key] = _other(holder[key], [other[place] for other, place in places], chance)
    return json.dumps(manifest).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in [*value] if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _other(value: Any, others: list[Any], chance: random.Random) -> Any:
    if isinstance(value, list):
        return chance.choice((value[1:], value[:-1], value * 2, value[::-1], []))
    if isinstance(value, dict):
        return chance.choice([other for other in others if isinstance(other, dict)])
    if chance.random() < 0.3:  # what stands elsewhere
        return chance.choice([other for other in others if type(other) is type(value)])
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)(chance.choice(_NUMBERS)(value))
    return chance.choice(TEXTS) if isinstance(value, str) else chance.choice((None, 1, True, False))
