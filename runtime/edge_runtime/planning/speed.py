"""Predicts speed, best draft length and joules of a pair on a device, as ranges, from its manifest and the speed of the device.

A forward of n rows reads every weight once and computes each row, so it takes: fixed cost of the layers + bytes / bandwidth + n x
operations / rate. At best the first row is computed while the weights are read, so that only the larger of the two times counts: the
roofline model (Williams et al. 2009, doi 10.1145/1498765.1498785). A round that drafts k tokens emits (1 - a^(k+1)) / (1 - a) expected
tokens at acceptance a (Leviathan et al. 2023, arXiv 2211.17192).
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from edge_devices.errors import byte_text
from edge_runtime.bundle.bundle import exported_quality
from edge_runtime.bundle.gguf_header import KvType, check_kv_type, row_bytes
from edge_runtime.bundle.manifest import MEDIA_ENCODER, Architecture, Manifest, VisionSize
from edge_runtime.config.settings import LONGEST
from edge_runtime.drafting.cost_model import MAX_ROWS, MeasuredCosts
from edge_runtime.drafting.energy_objective import PhasePower
from edge_runtime.drafting.policies import DrafterKind, is_model
from edge_runtime.errors import RequestError
from edge_runtime.media.encoder_inputs import DEFAULT_BUDGET, PATCH, POOLING, SIDE
from edge_runtime.planning.memory import (
    BATCH,
    MemoryPlan,
    MemoryRequest,
    encoder_activation_bytes,
    encoder_weight_bytes,
    memory_plan,
    onnx_memory_plan,
)


@dataclass(frozen=True, kw_only=True)
class Range:
    """The lowest, a middle, and the highest expected value."""

    low: float
    middle: float
    high: float

    @classmethod
    def between(cls, low: float, high: float) -> Range:
        """Returns the range with the geometric mean as its middle."""
        return cls(low=low, middle=math.sqrt(low * high), high=high)

    def plus(self, other: Range) -> Range:
        """Returns the range of the sum of two values that are low or high together."""
        return Range(low=self.low + other.low, middle=self.middle + other.middle, high=self.high + other.high)

    def times(self, factor: float) -> Range:
        """Returns the range in another unit."""
        return Range(low=self.low * factor, middle=self.middle * factor, high=self.high * factor)


def deviation(measured: float, predicted: Range) -> str:
    """Says how far the middle prediction is from the measurement (as a share of it, unless one is 0), and if that is in range."""
    inside = "in range" if predicted.low <= measured <= predicted.high else "OUT OF RANGE"
    if not measured or not predicted.middle:
        return f"{predicted.middle - measured:+.2g}, {inside}"
    return f"{predicted.middle / measured - 1:+.0%}, {inside}"


# The slowest useful speed, in tokens per second; common memory sizes of devices; and the share of the memory that programs can use.
SLOWEST, DEVICE_GB, DEVICE_SHARE = 2.0, (2, 4, 6, 8, 12, 16, 24, 32, 64), 0.75
# An encoder's time per row, relative to that of few rows with quantized weights: at best it is shorter, as in the batches of a prefill; at
# worst it is longer, because encoders have float weights.
_FASTER, _SLOWER = 0.4, 4.0


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """The predictions for an image of `rows` soft rows: seconds to encode it and to prefill its rows, and the joules of both.

    `joules` is None if the watts are not known. `encoder_bytes` is the memory of the encoder and its activations, which is allocated at the
    first image.
    """

    rows: int
    encode_seconds: Range
    prefill_seconds: Range
    joules: Range | None
    encoder_bytes: int
    derived: str


def image_plan(manifest: Manifest, operations: Range, prefill: Range, power: PhasePower | None) -> ImagePlan | None:
    """Returns the predictions for an image; None if the bundle has no GGUF encoder, or is too old to state its sizes.

    `operations` is the speed of a forward of few rows in operations per second, `prefill` in rows per second.
    """
    media = manifest.media
    if media is None or media.vision is None or not any(file.role == MEDIA_ENCODER for file in manifest.files):
        return None
    rows = DEFAULT_BUDGET
    needed = image_operations(media.vision, manifest.architecture.hidden_size, rows)
    encode = Range.between(needed * _FASTER / operations.high, needed * _SLOWER / operations.low)
    filled = Range(low=rows / prefill.high, middle=rows / prefill.middle, high=rows / prefill.low)
    return ImagePlan(
        rows=rows,
        encode_seconds=encode,
        prefill_seconds=filled,
        joules=encode.plus(filled).times(power.forward(rows)) if power is not None else None,
        encoder_bytes=encoder_weight_bytes(manifest) + encoder_activation_bytes(manifest, "image", rows),
        derived=f"estimated: {needed / 1e9:.3g} G operations of the encoder at {_FASTER:g} to {_SLOWER:g} times the seconds of few tokens,"
        f" then the prefill of {rows} tokens; joules are "
        + ("these seconds x the watts of a step" if power else "not known without watts"),
    )


def image_operations(vision: VisionSize, text_size: int, rows: int) -> float:
    """Returns the number of operations to encode an image of `rows` soft rows."""
    size, out = vision.hidden_size, 2.0 * rows * vision.hidden_size * text_size
    if vision.layers is None or vision.feed_forward_size is None:
        return out + 2.0 * rows * 3 * SIDE**2 * size
    patches = rows * POOLING**2
    layer = 2.0 * patches * (4 * size**2 + 3 * size * vision.feed_forward_size) + 4.0 * patches**2 * size
    return out + 2.0 * patches * 3 * PATCH**2 * size + vision.layers * layer


# Seconds to start a forward, and seconds per layer to start its kernels and to synchronize threads. They are what remains for pairs so
# small that reading and computing take no time. Assumed from one small pair on one machine.
FORWARD_SECONDS = (50e-6, 300e-6)
LAYER_SECONDS = (10e-6, 60e-6)
# The acceptance of a draft if those before it are accepted: for text that is hard, and for text that is easy to predict.
ACCEPTANCE = (0.5, 0.85)
# The rows of a prefill's batch are computed together, so at best a row takes this share of the time of one more row in a small batch.
PREFILL_SHARE = 0.4
# The prompt length for which the time to the first token is predicted, typical of agents and documents.
PROMPT_TOKENS = 2000
# A sparse head reads its centroids and the rows of a few clusters: this share of the dense head.
SPARSE_SHARE = 1 / 32
# An upper bound of the attention weights of a Gemma 4 layer (queries, keys, values and output), as a multiple of the hidden size squared.
_ATTENTION = 8
DRAFTER_ROLES = {"dense": ("drafter",), "split": ("drafter", "drafter_head")}


@dataclass(frozen=True, kw_only=True)
class SpeedProfile:
    """The speed of a device: bytes read per second, and operations per second in a forward of few rows. `*_from` name their sources.

    `memory_available` is in bytes, None for a device other than this machine. `largest_gb` is the largest memory that such a device is sold
    with, if known. `load` says what disturbed the probes, if anything.
    """

    name: str
    bandwidth: Range
    bandwidth_from: str
    operations: Range
    operations_from: str
    memory_available: int | None = None
    largest_gb: int | None = None
    load: str = ""


@dataclass(frozen=True, kw_only=True)
class PairFacts:
    """The sizes of a pair that determine its speed.

    - `target_bytes`, `step_bytes`: bytes of weights that a forward and a draft step read.
    - `parameters`, `drafter_parameters`: how many weights a row is multiplied with.
    - `head_parameters`: those of `parameters` that belong to the output head, which a prefill skips.
    - `prompt_parameters`: those of `parameters` that a prompt's row needs for its K and V.
    - `kv_bytes`: bytes of the K/V rows that a row attends to if the context is full.
    """

    target_bytes: float
    step_bytes: float
    parameters: float
    head_parameters: float
    prompt_parameters: float
    drafter_parameters: float
    layers: int
    drafter_layers: int
    kv_bytes: float


@dataclass(frozen=True, kw_only=True)
class SpeedPlan:
    """The predictions for a pair on a device.

    - `prefill`, `plain`, `drafted`: tokens per second of a prompt, of plain decoding, and with drafts.
    - `first_token_seconds`: time to the first token after a prompt of `prompt_tokens`.
    - `step_seconds`: of a draft step; `verify_seconds[n - 1]`: the middle prediction for a verify of n rows.
    - `draft_length`: lowest, middle and highest prediction of the best length.
    - `joules_*`: None if the power is not known.
    - `derived`: explains how each figure was computed; `answers`: the quality of the export in words.
    """

    device: str
    memory: MemoryPlan
    read_bytes: float
    prefill: Range
    prompt_tokens: int
    first_token_seconds: Range
    plain: Range
    drafted: Range
    step_seconds: Range
    verify_seconds: tuple[float, ...]
    draft_length: tuple[int, int, int]
    joules_per_token: Range | None
    joules_per_prompt_token: Range | None
    derived: dict[str, str]
    image: ImagePlan | None = None
    memory_available: int | None = None
    largest_gb: int | None = None
    load: str = ""
    answers: str = ""

    def decision(self) -> tuple[bool, str]:
        """Returns whether the pair is worth running on the device, and a sentence that says why."""
        enough, free = self.memory.enough, self.memory_available
        if free is not None and enough > free:
            return False, f"no: it needs {byte_text(enough)} of memory and {byte_text(free)} are available; take a smaller size or context"
        if self.largest_gb is not None and enough > DEVICE_SHARE * self.largest_gb * 1e9:
            its_memory = f"{self.largest_gb} GB at most, a quarter of it left to the system"
            return False, f"no: it needs {byte_text(enough)} of memory, and the device has {its_memory}; take a smaller size or context"
        if self.drafted.middle < SLOWEST:
            return False, f"no: about {self.drafted.middle:.2g} tokens per second, with drafts; take a smaller size or a faster device"
        sizes = [size for size in DEVICE_GB if enough <= DEVICE_SHARE * size * 1e9]
        where = f"devices with {sizes[0]} GB and more" if sizes else f"more than {DEVICE_GB[-1]} GB"
        memory = f"{byte_text(free)} are available" if free is not None else f"for {where}, a quarter of it left to the system"
        return True, f"yes: {byte_text(enough)} of memory are enough, {memory}"

    def to_json(self) -> dict[str, Any]:
        low, middle, high = self.draft_length
        record = asdict(self) | {"draft_length": {"low": low, "middle": middle, "high": high}, "verify_seconds": list(self.verify_seconds)}
        record["fits"], record["decision"] = self.decision()
        record["memory"] |= {
            "total": self.memory.total,
            "reserved": self.memory.reserved,
            "of_files": self.memory.of_files,
            "with_short_prompts": self.memory.with_short_prompts,
            "enough": self.memory.enough,
            "least": self.memory.minimum(self.read_bytes),
        }
        return record


_FORMATS = {"llama": ("gguf",), "onnx": ("onnx", "onnx_data")}


def of_backend(manifest: Manifest, backend: str | None) -> Manifest:
    """Returns the manifest without the other backend's models. `backend` is llama or onnx; None returns the manifest unchanged."""
    others = [name for kind, formats in _FORMATS.items() if backend not in (None, kind) for name in formats]
    return replace(manifest, files=tuple(file for file in manifest.files if file.format not in others))


def is_onnx(manifest: Manifest) -> bool:
    """Whether a plan is about ONNX graphs: they are used if there is no target in another format."""
    targets = {file.format for file in manifest.files if file.role == "target"}
    return "onnx" in targets and not targets - {"onnx"}


def role_bytes(manifest: Manifest) -> dict[str, int]:
    """Returns the bytes of weights by role. Those of ONNX graphs include their data, and the head counts as part of the target."""
    formats = _FORMATS["onnx" if is_onnx(manifest) else "llama"]
    sizes: dict[str, int] = {}
    for file in manifest.files:
        if file.format in formats:
            role = file.role.removesuffix("_data").replace("target_head", "target")
            sizes[role] = sizes.get(role, 0) + file.bytes
    return sizes


def sparse_share(own: Architecture) -> float:
    """Returns the share of a drafter's weights that a draft step with the sparse head reads."""
    return 1 - (1 - SPARSE_SHARE) * min(1.0, own.vocab_size * own.drafter_hidden_size / max(1, own.drafter_parameters))


def pair_facts(manifest: Manifest, drafter: str, context: int, kv_type: KvType) -> PairFacts:
    """Returns the sizes of the pair in a manifest; `drafter` is dense or split. Embedding tables do not count: few rows are read."""
    own, sizes = manifest.architecture, role_bytes(manifest)
    read = read_parameters(own)
    sparse = drafter == "split" or (is_onnx(manifest) and own.ordered_embeddings)
    step = sizes.get("drafter", 0) * (sparse_share(own) if sparse else 1.0)
    layout, kv = manifest.cache_layout, 0
    for owner in (*layout.layer_owners, *layout.drafter_sources):
        sliding = layout.sliding if layout.sliding and owner in layout.sliding.owner_layers else None
        kv += row_bytes(sliding or layout.full, kv_type) * min(context, (sliding.window if sliding else None) or context)
    return PairFacts(
        target_bytes=sizes.get("target", 0) * min(1.0, read / max(1, own.parameters)),
        step_bytes=step,
        parameters=read,
        head_parameters=(head_weights := min(read, own.vocab_size * own.hidden_size)),
        prompt_parameters=min(read - head_weights, own.prompt_parameters or read),
        drafter_parameters=own.drafter_parameters * min(1.0, step / max(1, sizes.get("drafter", step))),
        layers=own.layers,
        drafter_layers=own.drafter_layers,
        kv_bytes=kv,
    )


def manifest_plan(
    manifest: Manifest,
    device: SpeedProfile,
    *,
    context: int,
    kv_type: str = "f16",
    longest: int = LONGEST,
    drafter: DrafterKind | None = None,
    power: PhasePower | None = None,
    packed_cache: bool = True,
) -> SpeedPlan:
    """Returns the plan for a pair's GGUF files, or for its ONNX graphs if it has no GGUF target. Raises RequestError if a model is missing.

    `drafter` None takes the split drafter if the pair has one.
    """
    roles, onnx = set(role_bytes(manifest)), is_onnx(manifest)
    available = [kind for kind, needed in DRAFTER_ROLES.items() if roles.issuperset(needed)]
    chosen = (drafter if not onnx else None) or (available or ["dense"])[-1]
    if "target" not in roles or chosen not in available:
        raise RequestError(
            f"a plan needs a model and a dense or split drafter, but the bundle has {', '.join(sorted(roles)) or 'none'}; export them"
        )
    kv = check_kv_type(manifest.cache_layout, kv_type)
    request = MemoryRequest(
        context=context,
        kv_type=kv,
        sequences=1,
        batch=BATCH,
        verify_rows=longest + 1,
        drafter=chosen,
        repack=True,
        gives_back=sys.platform != "darwin",
        packed_cache=packed_cache,
    )
    facts, prompt_tokens = pair_facts(manifest, chosen, context, kv), min(PROMPT_TOKENS, context)
    memory = onnx_memory_plan(manifest, request) if onnx else memory_plan(manifest, request)
    plan = speed_plan(facts, device, memory, longest, power, prompt_tokens)
    quality = exported_quality((manifest.parity or {}).get("onnx") if onnx else manifest.parity)
    answers = "" if quality is None else quality.words
    return replace(plan, image=image_plan(manifest, device.operations, plan.prefill, power), answers=answers)


def speed_plan(
    facts: PairFacts, device: SpeedProfile, memory: MemoryPlan, longest: int, power: PhasePower | None, prompt_tokens: int = PROMPT_TOKENS
) -> SpeedPlan:
    """Returns the predictions for drafts of at most `longest` tokens, with joules if the watts of the phases are known."""
    ends = [_Scene.of(facts, device, i) for i in (0, 1, 2)]
    slow, middle, fast = ends
    best = [scene.best(longest) for scene in ends]
    # The best length rises with the acceptance and falls with the cost of a row, so its extremes are at opposite ends of the two.
    mixed = [_Scene.of(facts, device, rows, accept) for rows, accept in itertools.product((0, 2), repeat=2)]
    lengths = [scene.best(longest) for scene in mixed]
    joules = prompt_joules = None
    if power is not None:
        prompt_joules = _range(scene.prefill_row * power.verify for scene in ends)
        each = sorted(min(scene.per_token(n, power) for n in range(longest + 1)) for scene in ends)
        joules = Range(low=each[0], middle=each[1], high=each[2])
    return SpeedPlan(
        device=device.name,
        memory=memory,
        read_bytes=facts.target_bytes,
        prefill=_range(1 / scene.prefill_row for scene in ends),
        prompt_tokens=prompt_tokens,
        first_token_seconds=_range((prompt_tokens - 1) * scene.prefill_row + scene.verify(1) for scene in ends),
        plain=_range(scene.rate(0) for scene in ends),
        drafted=_range(scene.rate(n) for scene, n in zip(ends, best, strict=True)),
        step_seconds=_range(scene.step for scene in ends),
        verify_seconds=tuple(middle.verify(n) for n in range(1, longest + 2)),
        draft_length=(min(lengths), best[1], max(lengths)),
        joules_per_token=joules,
        joules_per_prompt_token=prompt_joules,
        derived=_derived(facts, device, slow, fast, power),
        memory_available=device.memory_available,
        largest_gb=device.largest_gb,
        load=device.load,
    )


@dataclass(frozen=True, kw_only=True)
class _Scene:
    """One set of assumptions: an acceptance, and the seconds of a forward without rows, a row, a draft step, and a prefill's row."""

    base: float
    row: float
    step: float
    prefill_row: float
    acceptance: float

    @classmethod
    def of(cls, facts: PairFacts, device: SpeedProfile, number: int, accept: int | None = None) -> _Scene:
        """`number` 0 takes the slow end of every assumption, 1 the middle, 2 the fast end; `accept` overrides it for the acceptance."""

        def pick(values: Range) -> float:
            return (values.low, values.middle, values.high)[number]

        def pick_seconds(values: tuple[float, float]) -> float:
            return (values[1], math.sqrt(values[0] * values[1]), values[0])[number]

        bandwidth, start, layer = pick(device.bandwidth), pick_seconds(FORWARD_SECONDS), pick_seconds(LAYER_SECONDS)
        kv = facts.kv_bytes * (1.0, 0.5, 0.0)[number]
        row, step_row = (2 * weights / pick(device.operations) for weights in (facts.parameters, facts.drafter_parameters))
        # At worst, llama.cpp's stock kernels compute all layers for all rows of a prompt.
        prompt = facts.prompt_parameters if number else facts.parameters - facts.head_parameters
        reading, step_reading = (facts.target_bytes + kv) / bandwidth, facts.step_bytes / bandwidth
        if number == 2:  # at best, the first row is computed while the weights are read
            reading, step_reading = max(reading - row, 0.0), max(step_reading - step_row, 0.0)
        return cls(
            base=start + facts.layers * layer + reading,
            row=row,
            step=start + facts.drafter_layers * layer + step_reading + step_row,
            prefill_row=row * max(0.01, prompt / max(1, facts.parameters)) * (1.0, math.sqrt(PREFILL_SHARE), PREFILL_SHARE)[number],
            acceptance=(ACCEPTANCE[0], sum(ACCEPTANCE) / 2, ACCEPTANCE[1])[number if accept is None else accept],
        )

    def verify(self, rows: int) -> float:
        return self.base + rows * self.row

    def tokens(self, drafted: int) -> float:
        return (1 - self.acceptance ** (drafted + 1)) / (1 - self.acceptance)

    def rate(self, drafted: int) -> float:
        return self.tokens(drafted) / (self.verify(drafted + 1) + drafted * self.step)

    def best(self, longest: int) -> int:
        return max(range(longest + 1), key=self.rate)

    def per_token(self, drafted: int, power: PhasePower) -> float:
        """Returns joules per token."""
        joules = self.verify(drafted + 1) * power.forward(drafted + 1) + drafted * self.step * power.draft
        return joules / self.tokens(drafted)


def _range(values: Any) -> Range:
    low, middle, high = sorted(values)
    return Range(low=low, middle=middle, high=high)


def read_parameters(own: Architecture) -> float:
    """Returns how many weights a row is multiplied with. Per-layer embeddings are only looked up, and only the active experts are read."""
    matrices = max(0, own.parameters - own.vocab_size * own.layers * (own.per_layer_size or 0))
    if own.feed_forward_size is None:
        return matrices
    layer = 3 * own.hidden_size * own.feed_forward_size + _ATTENTION * own.hidden_size**2
    return min(matrices, own.layers * (layer + own.hidden_size * (own.per_layer_size or 0) * 3) + own.vocab_size * own.hidden_size)


def _derived(facts: PairFacts, device: SpeedProfile, slow: _Scene, fast: _Scene, power: PhasePower | None) -> dict[str, str]:
    band = f"{device.bandwidth.low / 1e9:.3g} to {device.bandwidth.high / 1e9:.3g} GB/s ({device.bandwidth_from})"
    low, high = device.operations.low / 1e9, device.operations.high / 1e9
    rows = f"2 x {facts.parameters / 1e6:.4g} M operations a token at {low:.3g} to {high:.3g} G/s ({device.operations_from})"
    layers = "{:g} to {:g} µs a step and {:g} to {:g} a layer".format(*(1e6 * each for each in (*FORWARD_SECONDS, *LAYER_SECONDS)))
    accepted = f"{ACCEPTANCE[0]:.0%} to {ACCEPTANCE[1]:.0%} of drafts accepted after those before them, assumed"
    shape = " to ".join(f"{each:.2f}" for each in sorted(scene.verify(4) / scene.verify(1) for scene in (fast, slow)))
    return {
        "memory": "file sizes and cache layout, with short prompts; from what the system cannot reclaim to long prompts plus a tenth",
        "anonymous": "what the system cannot reclaim: process, K/V rows, activations, most with long prompts, copies not mapped",
        "of files": "weights mapped from the bundle or the packed cache, which the system drops where memory is short and reads again",
        "enough": "each weight once, mapped or repacked; from those that a token reads (of experts those in use) to all pages touched",
        "prefill": f"{rows}, of which K and V need {facts.prompt_parameters / max(1, facts.parameters):.0%}, at worst all but the head;"
        f" batches compute a token in {PREFILL_SHARE:.0%} to 100% of that",
        "first_token": "the prompt's tokens at the prefill's speed, and a step of its last one",
        "plain": f"{facts.target_bytes / 1e6:.4g} MB of weights and up to {facts.kv_bytes / 1e6:.3g} MB of the KV cache"
        f" read per token at {band}, {layers}",
        "drafted": f"the best length of each case: {accepted}; {rows}",
        "step": f"{facts.step_bytes / 1e6:.4g} MB read and 2 x {facts.drafter_parameters / 1e6:.4g} M operations"
        f" at the same speeds, {facts.drafter_layers} layers",
        "draft_length": f"most tokens per second; {accepted}, a step of 4 tokens takes {shape} x that of one",
        "joules": "watts per phase are not known; give --phase-power FILE"
        if power is None
        else "seconds of each phase x its watts, at the best length; of a prompt's token those of the prefill x the watts of a step",
    }


# Computed costs: the figures that a session starts with if nothing was measured on the machine.

# The bandwidth of forwards of one row, assumed for all processors; measured on two cores of a Xeon (22 November 2026). Weights of up to
# CACHE_BYTES stay in the processor's caches, whose bandwidth is higher.
BANDWIDTH = 20e9
CACHE_BYTES, CACHE_BANDWIDTH = 16 << 20, 100e9
# Seconds per forward that do not depend on the weights (calls, choosing tokens, Python), with the project's kernels and with stock ones;
# and seconds per row. These and the seconds of drafts below were measured with small pairs.
CALL_SECONDS, STOCK_CALL_SECONDS, ROW_SECONDS = 0.25e-3, 0.6e-3, 0.02e-3
# The time of each further row, as a share of reading the weights once. In order: the project's kernels with wide integer products (64
# bytes, or matrix instructions), its other kernels, stock kernels. The first and the last are measured (docs/results.md), the second is
# assumed.
WIDE_KERNELS = ("avx512vnni", "avxvnni", "i8mm")
WIDE_ROW, NARROW_ROW, STOCK_ROW = 0.07, 0.2, 0.25
# How many times longer stock kernels take for one row, by file format (E2B's shapes, two cores of a Xeon, 22 November 2026).
STOCK_FIRST = {"gguf": 2.0, "onnx": 1.7}
# Seconds to start a draft, and seconds per draft step besides reading the drafter's weights: with the project's kernels, which make a whole
# draft in one call, and with stock ones.
DRAFT_SECONDS, STEP_SECONDS = 0.05e-3, 0.03e-3
STOCK_DRAFT_SECONDS, STOCK_STEP_SECONDS = 0.3e-3, 0.2e-3
# Seconds per token of prompt lookup, which only copies from the text.
COPY_SECONDS = 10e-6


def row_reads(manifest: Manifest, format: str) -> float:
    """Returns how many bytes of weights a forward of one row reads from the target's files of this `format`, such as gguf."""
    size = sum(file.bytes for file in manifest.files if file.format.startswith(format) and file.role.startswith("target"))
    return size * min(1.0, read_parameters(manifest.architecture) / max(1, manifest.architecture.parameters))


def computed_costs(manifest: Manifest, format: str, drafter: DrafterKind, row_kernels: str | None) -> MeasuredCosts:
    """Returns costs that follow from the files of this `format`, such as gguf. `row_kernels` names the project's kernels in use, or None.

    A forward of one row reads every weight once, so it takes a fixed time and bytes / bandwidth. Each further row takes a share of the time
    of reading, which depends on the kernels. Only the proportions matter to draft lengths, and the first rounds correct them, so the
    figures need not be exact.
    """
    reads, slower = row_reads(manifest, format), STOCK_FIRST[format] if row_kernels is None else 1.0
    further = STOCK_ROW if row_kernels is None else WIDE_ROW if row_kernels in WIDE_KERNELS else NARROW_ROW
    first = (STOCK_CALL_SECONDS if row_kernels is None else CALL_SECONDS) + _reading(reads) * slower
    row = ROW_SECONDS + _reading(reads) * slower * further
    step, overhead = COPY_SECONDS, 0.0
    if is_model(drafter):
        sizes = {file.role: file.bytes for file in manifest.files if file.format.startswith(format)}
        share = sparse_share(manifest.architecture) if drafter == "split" else 1.0
        read = (sizes.get("drafter", 0) + sizes.get("drafter_data", 0)) * share
        if row_kernels is None:
            step, overhead = STOCK_STEP_SECONDS + read / BANDWIDTH, STOCK_DRAFT_SECONDS
        else:  # a forward of a large target evicts the drafter's weights from the caches
            step, overhead = STEP_SECONDS + _reading(read), DRAFT_SECONDS + (read / BANDWIDTH if reads > CACHE_BYTES else 0.0)
    verify = tuple(first + row * n for n in range(MAX_ROWS))
    return MeasuredCosts(verify=verify, step=step, overhead=overhead, timings=(0,) * MAX_ROWS)


def _reading(weights: float) -> float:
    """Returns the seconds to read this many bytes of weights."""
    return weights / (CACHE_BANDWIDTH if weights <= CACHE_BYTES else BANDWIDTH)
