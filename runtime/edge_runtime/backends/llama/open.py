"""The llama.cpp backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from edge_devices.errors import byte_text
from edge_devices.machine.memory import address_space_left, available_memory_bytes, share_one_arena
from edge_runtime.backends.interface import CPU, Accelerator, OpenedPair, OpenRequest, kernel_finding, lazy_encoder
from edge_runtime.backends.kernels.loader import build_hash
from edge_runtime.backends.llama.context import MAX_SEQUENCES, LlamaOptions
from edge_runtime.backends.llama.crash_probe import cached_probes, probe_load_options, try_device, workaround
from edge_runtime.backends.llama.loader import (
    LlamaDevice,
    device_named,
    devices,
    layers_that_fit,
    library_version,
    llama_library,
    system_info,
)
from edge_runtime.backends.llama.memory_trial import try_in_child
from edge_runtime.backends.llama.pair import LlamaSequenceBatch, drafter_opened, open_with_drafter
from edge_runtime.bundle.gguf_header import DEFAULT_KV_TYPE, check_kv_type
from edge_runtime.bundle.manifest import MEDIA_ENCODER
from edge_runtime.drafting.policies import is_model
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.media.encoder_inputs import check_budget
from edge_runtime.planning.memory import BATCH, EncoderMemory, MemoryRequest, MemoryRoom, check_memory_without_copies, memory_plan


class LlamaBackend:
    """llama.cpp on the processor, and on the devices of its build. Implements `interface.Backend`."""

    options = frozenset({"kv_type", "memory_limit", "max_candidates", "device"})
    max_sequences = MAX_SEQUENCES

    def accelerators(self) -> dict[str, str]:
        return {device.name: _identity(device) for device in devices()}

    def missing_device(self, name: str) -> str | None:
        try:
            device_named(name)
        except RequestError as error:
            return str(error)
        return None

    def open(self, request: OpenRequest) -> OpenedPair:
        bundle, manifest = request.bundle, request.bundle.manifest
        probed = [bundle.file("target", "gguf"), *([bundle.file("drafter", "gguf")] if is_model(request.drafter) else [])]
        quantizations = [file.quantization or "unknown" for file in probed]
        device = None if request.device in (None, CPU) else device_named(request.device)
        plan, room_for_copies = _checked_memory(request, device)
        paths = [bundle.folder / file.path for file in probed]
        options = _options(request, plan, device)
        if (left := address_space_left()) is not None:
            repack = _repacks_in_trial(request, options, left, room_for_copies)
        else:
            drafter_path = paths[1] if paths[1:] else None
            hashes = [file.sha256 for file in probed]
            probe = probe_load_options(paths[0], drafter_path, quantizations, hashes=hashes, notify=request.notify, waiting=request.waiting)
            repack = probe.use_extra_bufts and room_for_copies
            if device is not None:
                try_device(paths[0], drafter_path, options, driver=_identity(device), notify=request.notify, waiting=request.waiting)
        options = replace(options, use_extra_bufts=repack)
        packed = request.packed_cache if repack and device is None else None
        target, drafter, kind = open_with_drafter(bundle, options, request.drafter, packed)
        batch = LlamaSequenceBatch(target, drafter)
        kernels = llama_library().row_kernels
        on_device = () if device is None else (device.name, options.device_layers, _identity(device))
        facts = (options.kv_type, kind, repack, kernels, library_version(), system_info(), *quantizations, *on_device)
        planned = memory_plan(manifest, replace(plan, repack=room_for_copies)).reserved
        room = EncoderMemory(manifest, available_memory_bytes, one_file=True, limit=request.memory_limit, beside=planned)
        return OpenedPair(
            batch=batch,
            drafters=batch.drafters,
            drafter_kind=kind,
            vocabulary=target.vocabulary,
            speed_facts=facts,
            answer_facts=(request.sequences, *facts),
            row_kernel_facts=(repack, kernels, build_hash(), library_version(), system_info(), *on_device),
            exported_parity=manifest.parity,
            row_kernels=kernels if repack and device is None else None,
            accelerator=None if device is None else Accelerator(name=device.name, driver=_identity(device)),
            encoder=lazy_encoder(bundle, "gguf", lambda: target.shared.open_encoder(bundle.path(MEDIA_ENCODER, "gguf")), room),
            set_threads=batch.set_threads if device is None else None,
        )

    def describe(self) -> dict[str, Any]:
        """Adds `system_info`, `probes` (fields of `ProbeAnswer`), `stock_reason`, and `devices` other than the CPU."""
        library = llama_library()
        return {
            "version": library_version(),
            "system_info": system_info(),
            "probes": [asdict(probe) for probe in cached_probes()],
            "row_kernels": library.row_kernels,
            "stock_reason": library.stock_reason,
            "devices": [{name: getattr(each, name) for name in ("name", "kind", "hardware", "driver")} for each in devices()],
        }

    def findings(self, description: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        build = f"llama-cpp-python {description['version']} with the MTP interface; {_instruction_sets(description['system_info'])}"
        untested = "not yet tested with a model; the first use of a bundle does that, in a child process"
        return [
            ("llama.cpp", "ok", build),
            ("", "", "; ".join(_tested(description["probes"])) or untested),
            kernel_finding(description["row_kernels"], description["stock_reason"]),
            *(
                (f"device {each['name']}", "ok", f"{each['kind'].upper()}: {each['hardware'] or 'unnamed'} ({each['driver']})")
                for each in description["devices"]
            ),
        ]

    def remedy(self, version: str) -> str | None:
        return workaround(version)


BACKEND = LlamaBackend()


def _instruction_sets(system_info: str) -> str:
    """Names the instruction sets in llama.cpp's line "CPU : SSE3 = 1 | AVX2 = 1 | ... |"."""
    parts = (part.rpartition(":")[2].partition("=") for part in system_info.split("|"))
    names = [name.strip() for name, _, value in parts if value.strip() == "1"]
    return f"built for {' '.join(names)}" if names else "the build lists no instruction sets"


def _tested(probes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for kernels, repacked in (("works with all kernels", True), ("works only without weight repacking, which makes prompts slower", False)):
        pairs = ["+".join(probe["quantizations"]) for probe in probes if probe["use_extra_bufts"] is repacked]
        if pairs:
            yield f"tested with {', '.join(pairs)}: {kernels}"


def _identity(device: LlamaDevice) -> str:
    return f"{device.hardware}; {device.driver}"


def _checked_memory(request: OpenRequest, device: LlamaDevice | None) -> tuple[MemoryRequest, bool]:
    """Returns what the bundle needs memory for, and whether repacked copies of the weights fit too. RequestError if it does not fit at all.

    The plan includes the copies, because whether weights are repacked is decided later.
    """
    if address_space_left() is not None:
        share_one_arena()
        llama_library()  # loaded first, so that the address space it takes is not counted as free
    media, settings, limit = request.bundle.manifest.media, request.settings, request.memory_limit
    check_budget(request.image_rows)
    plan = MemoryRequest(
        context=settings.context,
        kv_type=check_kv_type(request.bundle.manifest.cache_layout, request.kv_type or DEFAULT_KV_TYPE),
        sequences=request.sequences,
        batch=max(BATCH, request.image_rows) if media is not None and media.bidirectional else BATCH,
        verify_rows=settings.longest_draft + 1,
        drafter=drafter_opened(request.bundle, request.drafter, CPU if device is None else device.name),
        repack=device is None,
        gives_back=device is None and sys.platform.startswith("linux") and llama_library().row_kernels is not None,
        packed_cache=request.packed_cache is not None,
    )
    room = MemoryRoom(limit=limit, available=available_memory_bytes() if limit is None else None, address_space=address_space_left())
    return plan, check_memory_without_copies(request.bundle.manifest, plan, room, request.notify)


def _repacks_in_trial(request: OpenRequest, options: LlamaOptions, left: int, room_for_copies: bool) -> bool:
    """Returns whether the bundle runs with repacked weights in `left` bytes of address space, by a trial in a child process.

    The trial replaces the crash probe, which could not tell a lack of address space from a crash. Raises BackendError if the bundle does
    not run without repacked weights either.
    """
    for repack in (True, False) if room_for_copies else (False,):
        try:
            try_in_child(request.bundle.folder, replace(options, use_extra_bufts=repack), request.drafter, left)
        except BackendError:
            if not repack:
                raise
            request.notify("There is no address space for repacked copies of the weights, which are quicker; the mapped files are used.")
        else:
            return repack
    raise AssertionError("a trial without copies returns or raises")


def _options(request: OpenRequest, plan: MemoryRequest, device: LlamaDevice | None) -> LlamaOptions:
    media = request.bundle.manifest.media
    return LlamaOptions(
        context=plan.context,
        threads=request.threads,
        draft=is_model(request.drafter),
        max_draft_length=request.settings.longest_draft,
        max_candidates=request.settings.max_candidates,
        sequences=plan.sequences,
        kv_type=plan.kv_type,
        batch=plan.batch,
        bidirectional=media is not None and media.bidirectional,
        device=CPU if device is None else device.name,
        device_layers=-1 if device is None else _layers_on(device, request, plan),
    )


def _layers_on(device: LlamaDevice, request: OpenRequest, plan: MemoryRequest) -> int:
    """Returns how many layers fit into the device's free memory, after the drafter, KV cache and buffers. RequestError if none does.

    Tells the user if not all layers fit.
    """
    planned, bundle = memory_plan(request.bundle.manifest, plan), request.bundle
    target = bundle.file("target", "gguf").bytes
    layers = bundle.manifest.architecture.layers
    beside = planned.weights - target + planned.cache + planned.buffers
    free = device.free_bytes()
    fitting = layers_that_fit(free, target, beside, layers)
    if free is not None and fitting == 0:
        raise RequestError(
            f"{device.name} has {byte_text(free)} of free memory, too few for a layer beside the KV cache and activations of"
            f" {byte_text(beside)}; ask for a smaller context, or leave --device out"
        )
    if free is not None and fitting > 0:
        request.notify(
            f"{fitting} of {layers} layers run on {device.name}, which has {byte_text(free)} of free memory; the others run on the CPU."
        )
    return fitting
