"""The interface of a backend for code that opens bundles: its options, the pair it opens, and the facts it reports of its library."""

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

# The kinds of devices, by which one may be asked for.
CPU, GPU, NPU = "cpu", "gpu", "npu"
NO_KERNELS = "no row kernels: standard operators"
_ENCODERS = (MEDIA_ENCODER, VISION_ENCODER, AUDIO_ENCODER)


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """A bundle that is to be opened for `sequences` requests at once. Options that are None or False were not asked for.

    `drafter` None takes the fastest kind. `memory_limit` is in bytes. `device` names a device or its kind (gpu, npu).
    `packed_cache` keeps packed weights between starts. `notify` gets sentences about slow steps; `waiting` shows them.
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
    """A device beside the CPU: its name, and in one line what its results depend on: hardware, plug-in and drivers."""

    name: str
    driver: str


@dataclass(frozen=True, kw_only=True)
class OpenedPair:
    """A pair in memory: a target and a drafter for each sequence, all closed with `batch`.

    `speed_facts` are what its speed depends on beside files, threads and machine; `answer_facts` what its answers depend on beside files,
    context and machine; `row_kernel_facts` what the bits of K/V rows depend on beside files, K/V type and machine. `exported_parity` is
    what the export measured with these files. `row_kernels` names the variant of the project's own kernels that multiplies, None for stock
    ones; `stock_attention` says that the engine's own attention reads K/V rows beside them. `set_threads` is None where all phases run on
    as many threads. `accelerator` computes in the CPU's place; whoever opened it compares both before it is trusted.
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
    """One library that runs bundles; `open.py` of its folder has one as BACKEND. Importing that loads no library.

    `options` are those of `OpenRequest.special_options` that it has.
    """

    options: frozenset[str]
    max_sequences: int

    def accelerators(self) -> dict[str, str]:
        """Returns the names of the devices beside the CPU, those by software left out, and in one line what their results depend on."""

    def missing_device(self, name: str, /) -> str | None:
        """Returns a sentence that names the available devices if the requested device is not usable here; None if it is."""

    def describe(self) -> dict[str, Any]:
        """Returns the `version` and features of its library, which it loads: on a wrong processor that may end the process.

        `row_kernels` is the variant of the project's own kernels that multiplies, None for stock ones. Plain values under stable keys.
        """

    def findings(self, description: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        """Returns what `edge-run doctor` prints of it: subject, "ok" or "missing", and a sentence. No subject: that of the row before."""

    def remedy(self, version: str) -> str | None:
        """A sentence: what to do if this version of the library crashes the process."""

    def open(self, request: OpenRequest) -> OpenedPair:
        """Opens the pair; its options were checked.

        Raises RequestError if it does not fit into memory, BundleError if the bundle lacks the drafter, BackendError if a file does not
        load; then nothing stays open.
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
    """Returns the finding about the project's own kernels; `stock_reason` says why there are none."""
    if row_kernels is None:
        return "row kernels", "missing", f"{NO_KERNELS}; {stock_reason}"
    return "row kernels", "ok", f"{row_kernels}: all drafts of a step are checked in one reading of the weights"


def lazy_encoder(bundle: Bundle, format: str, load: Callable[[], Encoder], room: Room) -> LazyEncoder | None:
    """Returns the encoder of images and sound from the bundle's files of a format; None if it has none."""
    files = [file for file in bundle.manifest.files if file.format.startswith(format) and file.role.removesuffix("_data") in _ENCODERS]
    if bundle.manifest.media is None or not files:
        return None
    return LazyEncoder(load, " ".join(file.sha256 for file in files), room)
