"""What a backend offers to code that opens bundles: its options, the opened pair, and facts about its library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edge_devices.waiting import Waiting
from edge_runtime.backends.kernels.packed_cache import PackedCache
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import AUDIO_ENCODER, MEDIA_ENCODER, VISION_ENCODER
from edge_runtime.calibration.first_use import ThreadCounts
from edge_runtime.config.settings import Settings
from edge_runtime.drafting.policies import DrafterKind
from edge_runtime.interfaces import Drafter, DraftRequest, Logits, SequenceBatch, Target, Vocabulary
from edge_runtime.media.soft_rows import Encoder, LazyEncoder, Room

# The kinds of devices. A user may ask for a kind instead of a device's name.
CPU, GPU, NPU = "cpu", "gpu", "npu"
NO_KERNELS = "no row kernels: standard operators"
_ENCODERS = (MEDIA_ENCODER, VISION_ENCODER, AUDIO_ENCODER)


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """A bundle to open, for `sequences` simultaneous requests. An option that is None was not asked for.

    `drafter` None takes the fastest kind. `memory_limit` is in bytes. `image_rows` is the most rows of one image. `device` names a device
    or its kind (gpu, npu). `packed_cache` keeps packed weights between starts. `notify` gets sentences about slow steps; `waiting` shows
    their progress.
    """

    bundle: Bundle
    settings: Settings
    sequences: int
    threads: int
    drafter: DrafterKind | None
    kv_type: str | None
    memory_limit: int | None
    image_rows: int
    device: str | None
    notify: Callable[[str], None]
    waiting: Waiting
    packed_cache: PackedCache | None = None

    def special_options(self) -> dict[str, object]:
        """The requested options that not every backend has."""
        options = {
            "kv_type": self.kv_type,
            "memory_limit": self.memory_limit,
            "max_candidates": self.settings.max_candidates,
            "device": None if self.device == CPU else self.device,
        }
        return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A device other than the CPU. `driver` is one line that states all its results depend on: hardware, plug-in and drivers."""

    name: str
    driver: str


@dataclass(frozen=True, kw_only=True)
class OpenedPair:
    """A pair in memory: a target and a drafter for each sequence. Closing `batch` closes all of them.

    The facts are parts of cache keys. `speed_facts`: what the speed depends on, besides files, threads and machine. `answer_facts`: what
    answers depend on, besides files, context and machine. `row_kernel_facts`: what the bits of K/V rows depend on, besides files, K/V type
    and machine.

    `exported_parity` is what the export measured with these files. `row_kernels` names the variant of the project's own kernels that
    multiplies, None if the engine's kernels do; `stock_attention` says that attention uses the engine's kernels even so. `set_threads` is
    None where all phases must run on the same number of threads. `accelerator` computes instead of the CPU; the caller compares its
    results with the CPU's before using it.
    """

    batch: SequenceBatch
    drafters: Sequence[Drafter | None]
    drafter_kind: DrafterKind
    vocabulary: Vocabulary
    speed_facts: tuple[object, ...]
    answer_facts: tuple[object, ...]
    row_kernel_facts: tuple[object, ...]
    exported_parity: object
    row_kernels: str | None
    stock_attention: bool = False
    accelerator: Accelerator | None = None
    encoder: LazyEncoder | None = None
    set_threads: Callable[[ThreadCounts], None] | None = None


class Backend(Protocol):
    """A library that runs bundles. `open.py` in its folder defines BACKEND; importing that module does not load the library.

    `options` are the names in `OpenRequest.special_options` that it supports.
    """

    options: frozenset[str]
    max_sequences: int

    def accelerators(self) -> dict[str, str]:
        """Returns the devices other than the CPU, software devices left out: each name with the line of `Accelerator.driver`."""

    def missing_device(self, name: str, /) -> str | None:
        """Returns a sentence that names the available devices if the requested device is not usable here; None if it is."""

    def describe(self) -> dict[str, Any]:
        """Loads its library and returns its `version` and features, as plain values under stable keys.

        `row_kernels` is as in `OpenedPair`. A library that was built for another processor may end the process.
        """

    def findings(self, description: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        """Returns rows for `edge-run doctor`: subject, "ok" or "missing", and a sentence. An empty subject repeats the one before."""

    def remedy(self, version: str) -> str | None:
        """Returns a sentence that says what to do if this version of the library crashes the process, or None."""

    def open(self, request: OpenRequest) -> OpenedPair:
        """Opens the pair. The caller has checked the options.

        Raises RequestError if it does not fit into memory, BundleError if the bundle lacks the drafter, BackendError if a file does not
        load. After an error, nothing stays open.
        """


class SingleSequence:
    """A `SequenceBatch` of one sequence, for backends that run one request at a time."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.targets = (target,)
        self._drafter = drafter

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        if (drafter := self._drafter) is None:
            return [[] for _ in requests]
        return [drafter.draft(request.last, request.draft_length, request.sampler, request.should_continue) for request in requests]

    def verify_all(self, batches: Sequence[tuple[int, Sequence[int]]]) -> list[Logits]:
        return [self.targets[0].verify(tokens) for _, tokens in batches]

    def close(self) -> None:
        if self._drafter is not None:
            self._drafter.close()
        self.targets[0].close()


def kernel_finding(row_kernels: str | None, stock_reason: str | None) -> tuple[str, str, str]:
    """Returns the row of `edge-run doctor` about the project's own kernels; `stock_reason` says why they are not used."""
    if row_kernels is None:
        return "row kernels", "missing", f"{NO_KERNELS}; {stock_reason}"
    return "row kernels", "ok", f"{row_kernels}: all drafts of a step are checked in one reading of the weights"


def lazy_encoder(bundle: Bundle, format: str, load: Callable[[], Encoder], room: Room) -> LazyEncoder | None:
    """Returns the encoder of images and sound in the bundle's files of this format; None if there is none."""
    files = [file for file in bundle.manifest.files if file.format.startswith(format) and file.role.removesuffix("_data") in _ENCODERS]
    if bundle.manifest.media is None or not files:
        return None
    return LazyEncoder(load, " ".join(file.sha256 for file in files), room)
