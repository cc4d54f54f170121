"""Opens a bundle on a backend and generates text: the Python interface of the runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from edge_runtime.backends.base import Drafter, Target, Together, Vocabulary
from edge_runtime.backends.choice import BackendKind, choose_backend
from edge_runtime.bundle import Bundle, open_bundle
from edge_runtime.decode import Round
from edge_runtime.drafters import DRAFTER_KINDS, DrafterKind
from edge_runtime.errors import RequestError
from edge_runtime.generation import GREEDY_PARAMS, Generation, GenerationOptions, OpenedPair
from edge_runtime.lockstep import Lockstep
from edge_runtime.policies import DraftLengthPolicy, Fixed
from edge_runtime.rules import DEFAULT_ACCEPTANCE
from edge_runtime.sampling import SamplingParams

__all__ = ["Generation", "Session", "Sessions", "default_threads", "open_session", "open_sessions"]


def default_threads() -> int:
    """Returns how many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Session:
    """An opened pair. One request at a time; not thread-safe."""

    def __init__(
        self, bundle: Bundle, target: Target, drafter: Drafter | None, vocabulary: Vocabulary, drafter_kind: DrafterKind = "dense"
    ) -> None:  # fmt: skip
        self.bundle = bundle
        self.target = target
        self.drafter = drafter
        self.drafter_kind = drafter_kind
        self.vocabulary = vocabulary

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        draft_length: int | None = None,
        policy: DraftLengthPolicy | None = None,
        sampling: SamplingParams = GREEDY_PARAMS,
        acceptance: str = DEFAULT_ACCEPTANCE,
        stop: Sequence[str] = (),
        chunk_size: int = 1,
        on_round: Callable[[Round], None] | None = None,
        reuse_prefix: bool = False,
    ) -> Generation:
        """Starts a request, greedy unless `sampling` says otherwise. `prompt` is text or token ids.

        `draft_length` 0 is plain decoding; None takes the bundle's recommendation; a `policy` decides instead of it. `acceptance`
        is "rejection" or "match": both leave the target's distribution as it is. For the rest see `GenerationOptions`.
        Raises RequestError when the prompt does not fit or an option makes no sense.
        """
        options = GenerationOptions(
            max_tokens=max_tokens, sampling=sampling, acceptance=acceptance, stop=stop, chunk_size=chunk_size, on_round=on_round,
            reuse_prefix=reuse_prefix,
        )  # fmt: skip
        ids = self.vocabulary.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError("the prompt has no tokens; give at least one (a beginning-of-sequence token will do)")
        if len(ids) >= self.target.context:
            raise RequestError(f"the prompt has {len(ids)} tokens, the context {self.target.context}; shorten it or raise --context")
        vocabulary_size = self.bundle.manifest.architecture.vocab_size
        if sampling.logit_bias and max(sampling.logit_bias) >= vocabulary_size:
            raise RequestError(f"logit_bias names token {max(sampling.logit_bias)}; the vocabulary ends at {vocabulary_size - 1}")
        if policy is None:
            policy = Fixed(self.draft_length_for(draft_length))
        pair = OpenedPair(target=self.target, drafter=self.drafter, vocabulary=self.vocabulary)
        return Generation(pair, ids, policy, options)

    def draft_length_for(self, asked: int | None) -> int:
        """Returns the draft length asked for, or the bundle's recommendation."""
        return self.bundle.manifest.runtime.draft_length if asked is None else asked

    def close(self) -> None:
        """Frees the models."""
        if self.drafter is not None:
            self.drafter.close()
        self.target.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_session(
    folder: Path | str, *, threads: int | None = None, context: int | None = None, drafter: DrafterKind | None = None,
    backend: BackendKind | None = None, execution_provider: str | None = None, uniform_rows: bool = False, keep_packed: bool = False,
    check_hashes: bool = True, notify: Callable[[str], None] = lambda _: None,
) -> Session:  # fmt: skip
    """Opens a bundle. `context` is in tokens; None takes the bundle's. `notify` gets sentences worth telling a person.

    `backend` None takes llama.cpp or onnxruntime, by what the bundle holds and what is installed. `drafter` None takes the bundle's
    drafter, and the faster one by a short measurement where llama.cpp has both the dense and the split. `execution_provider` and
    `uniform_rows` are for onnxruntime: where the graphs run, and whether a single row goes through the kernels of several (`OrtOptions`),
    as is `keep_packed`, which keeps packed weights on disk.
    Raises BundleError, BackendError, and RequestError for a drafter, backend or provider that is unknown.
    """
    bundle = _opened(folder, drafter, check_hashes)
    rows, count = context or bundle.manifest.runtime.context, threads or default_threads()
    if choose_backend(bundle, backend) == "llama":
        if execution_provider is not None or uniform_rows or keep_packed:
            raise RequestError("execution providers, uniform rows and packed weights are onnxruntime's; ask for them with the onnx backend")
        return _open_llama(bundle, 1, rows, count, drafter, notify).sessions[0]
    from edge_runtime.backends.ort_open import OrtOptions, open_onnx

    options = OrtOptions(
        context=rows, threads=count, provider=execution_provider, uniform_rows=uniform_rows, keep_packed=keep_packed
    )  # fmt: skip
    target, chosen, kind = open_onnx(bundle, options, drafter, notify)
    return Session(bundle, target, chosen, target.vocabulary, kind)


class Sessions:
    """Sessions that share one context of one pair: requests on different ones can run at once. Not thread-safe."""

    def __init__(self, sessions: Sequence[Session], together: Together) -> None:
        self.sessions = tuple(sessions)
        self.lockstep = Lockstep(together)
        self._together = together

    def run(self, generations: Sequence[Generation]) -> Iterator[tuple[Generation, Round]]:
        """Runs requests started on these sessions to their ends, those of different sessions at once; yields their rounds."""
        return self.lockstep.run(generations)

    def close(self) -> None:
        """Frees the models; ends all sessions."""
        self._together.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_sessions(
    folder: Path | str, count: int, *, threads: int | None = None, context: int | None = None, drafter: DrafterKind | None = None,
    check_hashes: bool = True, notify: Callable[[str], None] = lambda _: None,
) -> Sessions:  # fmt: skip
    """Opens a bundle on llama.cpp for `count` requests at once, each with a text of up to `context` tokens.

    For the rest see `open_session`. Raises BundleError if the bundle has no GGUF files: onnxruntime runs one request at a time.
    """
    bundle = _opened(folder, drafter, check_hashes)
    return _open_llama(bundle, count, context or bundle.manifest.runtime.context, threads or default_threads(), drafter, notify)


def _opened(folder: Path | str, drafter: DrafterKind | None, check_hashes: bool) -> Bundle:
    if drafter is not None and drafter not in DRAFTER_KINDS:
        raise RequestError(f"drafter {drafter!r} is unknown; choose one of {', '.join(DRAFTER_KINDS)}")
    return open_bundle(folder, check_hashes=check_hashes)


def _open_llama(
    bundle: Bundle, count: int, context: int, threads: int, drafter: DrafterKind | None, notify: Callable[[str], None]
) -> Sessions:  # fmt: skip
    """The first use on a machine probes the library in a child process, since a build may crash on the processor it runs on."""
    from edge_runtime.backends.llama_context import LlamaOptions
    from edge_runtime.backends.llama_drafters import open_together
    from edge_runtime.probe import probe_load_options

    has_model = drafter not in ("lookup", "none")
    probed = [bundle.file("target", "gguf"), *([bundle.file("drafter", "gguf")] if has_model else [])]
    paths = [bundle.folder / file.path for file in probed]
    quantizations = [file.quantization or "unknown" for file in probed]
    answer = probe_load_options(paths[0], paths[1] if has_model else None, quantizations, notify=notify)
    options = LlamaOptions(
        context=context, threads=threads, use_extra_bufts=answer.use_extra_bufts, draft=has_model, sequences=count
    )  # fmt: skip
    together, kind = open_together(bundle, options, drafter)
    sessions = [
        Session(bundle, target, own, together.vocabulary, kind) for target, own in zip(together.targets, together.drafters, strict=True)
    ]
    return Sessions(sessions, together)
