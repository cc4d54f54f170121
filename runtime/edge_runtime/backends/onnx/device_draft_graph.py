"""One draft step for devices that keep K/V rows in whole buffers, made of the drafter's graph, whose Loop runs elsewhere.

A step's token and hidden row are where the last one left them on the device, so a draft of any length is so many runs of one graph, and the
host reads once, at the end. Attention is plain products with whole buffers: GroupQueryAttention without new rows of its own is wrong there
with a window (onnxruntime-ep-webgpu 0.4.0). Patterns: `edge_export.onnx.graphs.drafter`, `attention` and `sparse_head`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from edge_devices.files.protobuf_wire import bytes_field, fields_of, number_field, whole_fields_of
from edge_runtime.backends.onnx.device_graph import constant, value_field, with_products
from edge_runtime.backends.onnx.row_kernels import STOCK_ATTENTION
from edge_runtime.bundle.manifest import CacheBuffer
from edge_runtime.bundle.onnx_file import FLOAT, INT64, Attribute, Node, OnnxGraph, integer_attribute, read_graph, with_graph
from edge_runtime.bundle.onnx_graph import CONTRIB

# The result of a step that the next one begins with, and the last column of `recent`: the token and its probability, as float32 [2, n].
TOKEN, HIDDEN, RECENT = "token", "hidden", "recent"
NEXT_TOKEN, NEXT_HIDDEN, NEXT_RECENT = "next_token", "next_hidden", "next_recent"
# Of the newest step: scores float32 [n] and the tokens int64 [n] that they belong to, if not all.
SCORES, CANDIDATES = "step_scores", "step_candidates"
# How many rows there are, which is the first that sliding layers see (float32 [1]), and the numbers of a buffer's rows [1, 1, 1, rows].
ROWS, FIRST = "rows_there", "first_attended"
_NAME, _NODE, _TENSOR, _INPUT = 2, 1, 5, 11
_UNSEEN = -1e30
_SLIDING = "sliding"


def places_of(kind: str) -> str:
    """The name of the input with the numbers of the rows of this kind's buffers."""
    return f"places_{kind}"


def draft_step_graph(model: bytes, buffers: Iterable[CacheBuffer]) -> bytes | None:
    """Returns the model of one step; None if the drafter has parts that are none of the patterns. `model` has passed `check_onnx`."""
    try:
        return _Step(read_graph(model), {name.encode(): buffer for buffer in buffers for name in (buffer.key, buffer.value)}).model(model)
    except (LookupError, ValueError):
        return None


class _Step:
    """A step's graph that is being made of the loop's body."""

    def __init__(self, graph: OnnxGraph, buffers: dict[bytes, CacheBuffer]) -> None:
        self._graph, self._buffers = graph, buffers
        (self._loop,) = (node for node in graph.nodes if node.operator == "Loop")
        self._body = self._loop.graphs[b"body"]
        self._added: list[bytes] = []
        self._before: list[Node] = []  # what all layers share
        self._nodes: list[Node] = []
        self._shared: dict[object, bytes] = {}

    def model(self, model: bytes) -> bytes:
        body, graph = self._body, self._graph
        renamed = dict(zip(list(body.inputs)[2:], self._loop.inputs[2:], strict=True))
        outer = [node for node in graph.nodes if node is not self._loop]
        for node in body.nodes:
            node.inputs = [renamed.get(name, name) for name in node.inputs]
        makers = {name: node for node in [*outer, *body.nodes] for name in node.outputs}
        for node in [*outer, *body.nodes]:
            node.sources = [makers.get(name) for name in node.inputs]
        for node in [*outer, *body.nodes]:
            self._take(node)
        following = body.outputs[2]
        (best,) = (node for node in body.nodes if node.operator == "ArgMax")
        read = {following, *self._choice(best, makers)}
        nodes = _still_read(with_products(graph, [*self._before, *self._nodes]), read)
        for node in nodes:
            for names in (node.inputs, node.outputs):
                names[:] = [NEXT_HIDDEN.encode() if name == following else name for name in names]
        self._declare(read)
        kept = {TOKEN, HIDDEN, *(name.decode() for name in graph.inputs if any(name in node.inputs for node in nodes))}
        graph.message = memoryview(_without_others(graph.message, {name.encode() for name in kept}))
        graph.nodes, graph.added = nodes, [*graph.added, *self._added]
        return with_graph(model, graph, None)

    def _take(self, node: Node) -> None:
        """A node of the step, or what stands in its place."""
        if node.operator == "FusedMatMul" and node.inputs[1] in self._buffers:
            scores = self._add("MatMul", node.inputs[0], self._turned(node.inputs[1]))
            self._add("Add", scores, self._mask(node.inputs[1]), name=node.outputs[0])
        elif node.operator == STOCK_ATTENTION:
            self._attend(node)
        elif (levels := _rounded_product(node)) is not None:
            self._multiply(node, levels)
        else:
            self._nodes.append(node)

    def _attend(self, node: Node) -> None:
        """Attention without new rows, as products: the heads of one K/V head are rows of one product."""
        query, _, _, key, value, _, _, cosine, sine, positions = node.inputs[:10]
        buffer, heads = self._buffers[key], node.integer(b"num_heads", 0)
        if len(node.outputs) != 1 or heads % buffer.kv_heads or node.numbers.get(b"scale") != 1:
            raise ValueError
        turned = self._add(
            "RotaryEmbedding", query, positions, cosine, sine, domain=CONTRIB, attributes=[integer_attribute("num_heads", heads)]
        )
        apart = self._add("Reshape", turned, self._sizes(1, buffer.kv_heads, heads // buffer.kv_heads, buffer.head_dim))
        scores = self._add("Add", self._add("MatMul", apart, self._turned(key)), self._mask(key))
        mixed = self._add("MatMul", self._add("Softmax", scores), value)
        self._add("Reshape", mixed, self._sizes(1, 1, heads * buffer.head_dim), name=node.outputs[0])

    def _multiply(self, node: Node, parts: tuple[bytes, bytes, bytes]) -> None:
        """The product of a row with gathered levels, of which zero is at 128, in float32."""
        row, levels, zero = parts
        centred = self._add("Sub", self._cast(levels, FLOAT), self._cast(zero, FLOAT))
        self._add("Mul", self._add("MatMul", row, centred), node.inputs[1], name=node.outputs[0])

    def _choice(self, best: Node, makers: dict[bytes, Node]) -> list[bytes]:
        """Adds what is read of the scores; returns the names of the step's results."""
        scores, (token,) = best.inputs[0], best.outputs
        results = [TOKEN_OUT, RECENT_OUT, SCORES_OUT]
        listed = next((node for node in self._body.nodes if node.operator == "Gather" and node.inputs[1] == token), None)
        if listed is not None:
            ids = listed.inputs[0]
            if makers[ids].operator != "Cast":
                raise ValueError(ids)
            token = self._add("Gather", makers[ids].inputs[0], token)  # before they are cast to int64, which devices do not gather
            self._add("Identity", ids, name=CANDIDATES.encode())
            results.append(CANDIDATES.encode())
        self._cast(self._add("Reshape", token, self._sizes(1, 1)), INT64, name=TOKEN_OUT)
        self._add("Identity", scores, name=SCORES_OUT)
        apart = self._add("Sub", scores, self._add("ReduceMax", scores))
        share = self._add("Reciprocal", self._add("ReduceSum", self._add("Exp", apart)))
        column = self._add("Reshape", self._add("Concat", self._cast(token, FLOAT), share, axis=0), self._sizes(2, 1))
        older = self._add("Slice", RECENT.encode(), self._sizes(1), self._sizes((1 << 63) - 1), self._sizes(1))
        self._add("Concat", older, column, axis=1, name=RECENT_OUT)
        return results

    def _turned(self, key: bytes) -> bytes:
        """The keys [1, kv_heads, head_dim, rows]."""
        if key not in self._shared:
            order = Attribute(_PERMUTATION, b"perm", integers=(0, 1, 3, 2))
            self._shared[key] = key + b"@turned"
            self._before.append(Node("Transpose", [key], [self._shared[key]], [order]))
        return self._shared[key]

    def _mask(self, key: bytes) -> bytes:
        """What is added to the scores of rows that are not there, or before the window."""
        kind = self._buffers[key].kind
        if (name := f"mask_{kind}".encode()) not in self._shared:
            places, none, unseen = places_of(kind).encode(), self._number(0.0), self._number(_UNSEEN)
            there, whole = f"there_{kind}".encode(), name + b"@whole"
            self._before.append(Node("Less", [places, ROWS.encode()], [there]))
            self._before.append(Node("Where", [there, none, unseen], [whole if kind == _SLIDING else name]))
            if kind == _SLIDING:
                self._before.append(Node("Less", [places, FIRST.encode()], [there + b"@before"]))
                self._before.append(Node("Where", [there + b"@before", unseen, whole], [name]))
            self._shared[name] = name
        return name

    def _declare(self, results: Iterable[bytes]) -> None:
        """Inputs and outputs that the drafter's graph does not have."""
        masked = {kind for kind in (buffer.kind for buffer in self._buffers.values()) if f"mask_{kind}".encode() in self._shared}
        ranks = {RECENT: 2, ROWS: 1, **{places_of(kind): 4 for kind in masked}, **({FIRST: 1} if _SLIDING in masked else {})}
        self._added += [value_field(_INPUT, name.encode(), FLOAT, rank) for name, rank in ranks.items()]
        shapes = {NEXT_TOKEN: (INT64, 2), NEXT_HIDDEN: (FLOAT, 3), NEXT_RECENT: (FLOAT, 2), SCORES: (FLOAT, 1), CANDIDATES: (INT64, 1)}
        given = {NEXT_HIDDEN, *(name.decode() for name in results)}
        self._added += [value_field(_OUTPUT, name.encode(), *shape) for name, shape in shapes.items() if name in given]

    def _add(
        self,
        operator: str,
        *inputs: bytes,
        name: bytes | None = None,
        domain: str = "",
        axis: int | None = None,
        attributes: Sequence[Attribute] = (),
    ) -> bytes:
        output = name or f"step@{len(self._nodes)}".encode()
        own = [*attributes] + ([integer_attribute("axis", axis)] if axis is not None else [])
        self._nodes.append(Node(operator, list(inputs), [output], own, domain))
        return output

    def _cast(self, value: bytes, to: int, name: bytes | None = None) -> bytes:
        return self._add("Cast", value, name=name, attributes=[integer_attribute("to", to)])

    def _sizes(self, *sizes: int) -> bytes:
        """A constant list of int64."""
        name = f"sizes@{sizes}".encode()
        if name not in self._shared:
            self._shared[name] = name
            self._added.append(constant(name, *sizes))
        return name

    def _number(self, value: float) -> bytes:
        """A constant float32 scalar."""
        name = f"number@{value}".encode()
        if name not in self._shared:
            self._shared[name] = name
            raw = bytes_field(8, name) + bytes_field(9, struct.pack("<f", value))
            self._added.append(bytes_field(_TENSOR, number_field(2, FLOAT) + raw))
        return name


TOKEN_OUT, RECENT_OUT, SCORES_OUT = NEXT_TOKEN.encode(), NEXT_RECENT.encode(), SCORES.encode()
_OUTPUT = 12
# AttributeProto `perm`: a list of integers (type 7), 0, 1, 3, 2.
_PERMUTATION = bytes_field(1, b"perm") + b"".join(number_field(8, axis) for axis in (0, 1, 3, 2)) + number_field(20, 7)


def _rounded_product(node: Node) -> tuple[bytes, bytes, bytes] | None:
    """The row, the levels and their zero, where a node scales the products of a row in two parts of 8 bits with levels."""
    total = node.sources[0] if node.operator == "Mul" and node.sources else None
    if total is None or total.operator != "Add":
        return None
    coarse = total.sources[0]
    for operator in ("Mul", "Cast", "MatMulInteger"):
        if coarse is None or coarse.operator != operator:
            return None
        if operator != "MatMulInteger":
            coarse = coarse.sources[0]
    assert coarse is not None
    quantized = coarse.sources[0]
    if quantized is None or quantized.operator != "DynamicQuantizeLinear" or len(coarse.inputs) != 4:
        return None
    return quantized.inputs[0], coarse.inputs[1], coarse.inputs[3]


def _still_read(nodes: Sequence[Node], outputs: Iterable[bytes]) -> list[Node]:
    """The nodes without those whose results nobody reads."""
    read, kept = set(outputs), list[Node]()
    for node in reversed(nodes):
        if not read.isdisjoint(node.outputs):
            kept.append(node)
            read.update(node.inputs, node.names_within)
    return kept[::-1]


def _without_others(graph: memoryview, inputs: set[bytes]) -> bytes:
    """The graph's message with its name, its constants and these of its inputs."""
    kept = b""
    for number, value, whole in whole_fields_of(graph):
        if number in (_NAME, _TENSOR) or (number == _INPUT and isinstance(value, memoryview) and _name_of(value) in inputs):
            kept += bytes(whole)
    return kept


def _name_of(value: memoryview) -> bytes:
    return next((bytes(part) for number, part in fields_of(value) if number == 1 and isinstance(part, memoryview)), b"")
