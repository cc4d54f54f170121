"""The ONNX Runtime backend: opens a bundle's graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from edge_devices.machine.memory import address_space_left, available_memory_bytes, share_one_arena
from edge_devices.machine.processors import keep_to_fastest, processor_groups
from edge_runtime.backends.interface import Accelerator, OpenedPair, OpenRequest, SingleSequence, kernel_finding, lazy_encoder
from edge_runtime.backends.kernels.loader import build_hash, stock_reason, variant
from edge_runtime.backends.kernels.packed_cache import PackedCache
from edge_runtime.backends.onnx.devices import (
    PLUG_INS,
    PROCESSOR,
    OrtDevice,
    SessionOptions,
    check_version,
    device_named,
    devices,
    library_version,
    plug_in_failure,
)
from edge_runtime.backends.onnx.drafter import AnyOrtDrafter, GraphDrafter, LoadingDraft, open_drafter
from edge_runtime.backends.onnx.graph_memory import Shape, check_graph_memory
from edge_runtime.backends.onnx.kv_cache import DTYPES, MAX_ROWS, SLIDING, check_buffers
from edge_runtime.backends.onnx.media_encoder import OrtMediaEncoder
from edge_runtime.backends.onnx.static_target import StaticOrtTarget
from edge_runtime.backends.onnx.target import (
    PREFILL_ROWS,
    PREFILL_SCORES,
    GraphTarget,
    OrtOptions,
    OrtTarget,
    PairFiles,
    pair_of,
)
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import AUDIO_ENCODER, VISION_ENCODER
from edge_runtime.drafting.policies import DrafterKind, is_model
from edge_runtime.drafting.sources import LookupDrafter
from edge_runtime.errors import BundleError, RequestError
from edge_runtime.interfaces import Drafter
from edge_runtime.planning.memory import EncoderMemory, rotation_bytes

# The fields of a device that `describe` returns.
_SHOWN = {"name", "kind", "hardware", "driver", "software"}


class OrtBackend:
    """ONNX Runtime on the CPU, and on the devices of its plug-ins. Implements `interface.Backend`."""

    options = frozenset({"device"})
    max_sequences = 1

    def accelerators(self) -> dict[str, str]:
        return {device.name: _identity(device) for device in devices() if device.kind != PROCESSOR.kind and not device.software}

    def missing_device(self, name: str) -> str | None:
        try:
            device_named(name)
        except RequestError as error:
            return str(error)
        return None

    def open(self, request: OpenRequest) -> OpenedPair:
        bundle, manifest = request.bundle, request.bundle.manifest
        if address_space_left() is not None:
            share_one_arena()
        groups = processor_groups()
        keep_to_fastest(sum(map(len, groups)), groups)  # allows all processors again, which an earlier session may have limited
        options = OrtOptions(
            context=request.settings.context,
            threads=request.threads,
            device=device_named(request.device),
        )
        packed = request.packed_cache if options.device.is_cpu else None
        target, drafter, kind = open_onnx(bundle, options, request.drafter, request.notify, packed)
        facts = (options, kind, variant())
        room = EncoderMemory(manifest, available_memory_bytes, one_file=False)
        whole_images = manifest.media is not None and manifest.media.bidirectional
        return OpenedPair(
            batch=SingleSequence(target, drafter),
            drafters=(drafter,),
            drafter_kind=kind,
            vocabulary=target.vocabulary,
            speed_facts=facts,
            answer_facts=(library_version(), *facts),
            row_kernel_facts=(library_version(), options.device, variant(), build_hash()),
            exported_parity=(manifest.parity or {}).get("onnx"),
            row_kernels=variant() if target.row_kernels else None,
            # The kernels' attention reads float32 rows only, so onnxruntime's own reads those of float16 and int8.
            stock_attention=any(buffer.dtype != "f32" for buffer in manifest.cache_layout.buffers),
            accelerator=None if options.device.is_cpu else Accelerator(name=options.device.name, driver=_identity(options.device)),
            encoder=None if whole_images else lazy_encoder(bundle, "onnx", lambda: media_encoder(bundle, options.threads), room),
        )

    def describe(self) -> dict[str, Any]:
        """Adds the `devices`, `stock_reason`, and as `plug_in_failures` why an installed plug-in cannot be used."""
        check_version()
        shown = [{name: value for name, value in asdict(replace(each, handle=None)).items() if name in _SHOWN} for each in devices()]
        failures = {plug_in.package: failure for plug_in in PLUG_INS if (failure := plug_in_failure(plug_in))}
        kernels = {"row_kernels": variant(), "stock_reason": stock_reason()}
        return {"version": library_version(), "devices": shown, "plug_in_failures": failures, **kernels}

    def findings(self, description: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        names = ", ".join(device["name"] for device in description["devices"])
        return [
            ("onnxruntime", "ok", f"onnxruntime {description['version']}; devices: {names}"),
            kernel_finding(description["row_kernels"], description["stock_reason"]),
            *((f"device {each['name']}", "ok", _device_words(each)) for each in description["devices"] if each["name"] != PROCESSOR.name),
            *((package, "broken", failure) for package, failure in description["plug_in_failures"].items()),
        ]

    def remedy(self, version: str) -> str | None:  # noqa: ARG002
        return None


BACKEND = OrtBackend()


def _identity(device: OrtDevice) -> str:
    return f"{device.hardware}; {device.driver}; onnxruntime {library_version()}"


def _device_words(device: Mapping[str, Any]) -> str:
    """Returns the line of `edge-run doctor` about a device."""
    software = ", by a software driver" if device["software"] else ""
    return f"{device['kind'].upper()}{software}: {device['hardware'] or 'unnamed'} ({device['driver']})"


def open_onnx(
    bundle: Bundle,
    options: OrtOptions,
    requested: DrafterKind | None,
    notify: Callable[[str], None] = lambda _: None,
    packed: PackedCache | None = None,
) -> tuple[GraphTarget, Drafter | None, DrafterKind]:
    """Returns the target, its drafter and the drafter's kind: split if the graph has the sparse head, else dense.

    Closing the target closes both. `notify` gets a sentence about nodes that the execution provider does not run. `packed` caches the
    target's packed weights. Raises BundleError if the bundle lacks the requested drafter, BackendError if a graph does not open; then
    nothing stays open.
    """
    own: DrafterKind = "split" if bundle.manifest.architecture.ordered_embeddings else "dense"
    if requested not in (None, own) and is_model(requested):
        raise BundleError(f"{bundle.folder}: the ONNX drafter's head is {own}, not {requested}; leave --drafter out")
    kind = requested or own
    files = pair_of(bundle, drafter=kind == own)
    check_pair_memory(files, options.context)
    target, drafter = open_pair(files, options, packed)
    owners = bundle.manifest.cache_layout.layer_owners
    if target.lacks_kernels or (isinstance(drafter, GraphDrafter) and drafter.lacks_kernels):
        notify(f"The graphs of {bundle.folder.name} are of an earlier version and run slower; export the bundle again.")
    # Unless layers share K/V rows, skipping unread rows would save only 2 %, which is not worth another export.
    elif not target.skips_unread_rows and any(owner != layer for layer, owner in enumerate(owners)):
        notify(
            f"The graphs of {bundle.folder.name} compute each token of a prompt in all layers; export the bundle again: that takes less."
        )
    if kind == "lookup":
        return target, LookupDrafter(target), kind
    for sentence in fallbacks(options.device.provider, target, drafter):
        notify(sentence)
    return target, drafter, kind


def media_encoder(bundle: Bundle, threads: int) -> OrtMediaEncoder:
    """Returns the encoders of a bundle that has graphs for them, on the CPU; each graph is opened at its first use."""
    image, sound = bundle.path(VISION_ENCODER, "onnx"), bundle.path(AUDIO_ENCODER, "onnx") if bundle.has(AUDIO_ENCODER, "onnx") else None
    return OrtMediaEncoder(image, sound, threads, bundle.manifest.architecture.hidden_size)


def open_pair(files: PairFiles, options: OrtOptions, packed: PackedCache | None = None) -> tuple[GraphTarget, AnyOrtDrafter | None]:
    """Opens the target and its drafter, if there is one. Closing the target closes both. Raises as `open_onnx` does."""
    check_version()
    session = SessionOptions(threads=options.threads, device=options.device)
    with LoadingDraft(files, session) as draft:
        target: OrtTarget | StaticOrtTarget
        if files.static is None:
            target = OrtTarget(files, options.context, session, packed)
        else:
            target = StaticOrtTarget(files, options.context, session)
        try:
            return target, open_drafter(files.drafter, target, session, files, draft) if files.drafter else None
        except BaseException:
            target.close()
            raise


def fallbacks(provider: str, target: GraphTarget, drafter: AnyOrtDrafter | None) -> list[str]:
    """Returns, for each graph, sentences about the nodes that run on another provider than `provider`."""
    graphs = target.assignments()
    if drafter is not None:
        graphs["drafter"] = drafter.assignments()
    sentences = []
    for name, providers in graphs.items():
        total = sum(sum(counts.values()) for counts in providers.values())
        for other, counts in providers.items():
            if other != provider:
                kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
                sentences.append(f"{name}: {sum(counts.values())} of {total} nodes fell back from {provider} to {other}: {kinds}.")
    return sentences


def check_pair_memory(files: PairFiles, context: int) -> int:
    """Returns the most bytes that values of one graph of the pair take, besides the pair's arrays. Raises as `check_graph_memory` does.

    A target's peak is either in a whole chunk of a prefill, or in a verify at the end of the context.
    """
    check_buffers(files.layout)
    check = partial(check_graph_memory, beside=_array_bytes(files, context))
    if files.static is not None:  # the graphs state their own shapes
        paths = [files.static.prefill, files.static.row, files.target, files.drafter]
        return max(check(path, {}) for path in paths if path is not None)
    forwards = ((PREFILL_ROWS, min(context, PREFILL_SCORES // PREFILL_ROWS)), (MAX_ROWS, context))
    needed = [check(files.target, *(_target(files, context, rows, length) for rows, length in forwards))]
    if files.target_head is not None:
        needed.append(check(files.target_head, {"hidden": (1, MAX_ROWS, files.hidden_size)}))
    if files.drafter is not None:
        needed.append(check(files.drafter, _shared(files, context, context)))
    return max(needed)


def _array_bytes(files: PairFiles, context: int) -> int:
    """Returns the bytes of a target's arrays outside its graphs: K/V rows, rotations, hidden rows and logits."""
    rows, fixed = context + MAX_ROWS, files.static is not None
    total = rotation_bytes(files.graphs.rotations, files.layout, rows)
    for buffer in files.layout.buffers:
        held = buffer.rows if fixed else min(buffer.rows, rows) if buffer.kind == SLIDING else rows
        total += 2 * held * buffer.kv_heads * buffer.head_dim * (4 if fixed else np.dtype(DTYPES[buffer.dtype]).itemsize)
    return total + 4 * (max(PREFILL_ROWS, MAX_ROWS) * files.hidden_size + MAX_ROWS * files.vocab_size)


def _target(files: PairFiles, context: int, rows: int, length: int) -> dict[str, Shape]:
    soft: dict[str, Shape] = {"soft_rows": (1, rows, files.hidden_size), "is_soft": (1, 1, 1)}
    return {"input_ids": (1, rows), "position_ids": (1, rows), **soft, **_shared(files, context, length + rows)}


def _shared(files: PairFiles, context: int, length: int) -> dict[str, Shape]:
    """Returns the shapes of the inputs that target and drafter share: K/V buffers with `length` rows, and tables of rotations."""
    shapes: dict[str, Shape] = {}
    for buffer in files.layout.buffers:
        rows = min(buffer.rows, length) if buffer.kind == SLIDING else length
        shapes |= dict.fromkeys((buffer.key, buffer.value), (1, buffer.kv_heads, rows, buffer.head_dim))
    for rotation in files.graphs.rotations:
        for word in ("cosine", "sine"):
            table = (context + MAX_ROWS, rotation.head_dim // 2)
            shapes |= {f"{word}_{rotation.kind}": table, f"{word}_{rotation.kind}_f16": table}
    return shapes
