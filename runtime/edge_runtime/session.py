"""Opens a bundle on a backend and generates text: the Python interface of the runtime."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from edge_runtime.backends.base import Drafter, Target, Vocabulary
from edge_runtime.bundle import Bundle, open_bundle
from edge_runtime.decode import Round, decode
from edge_runtime.errors import RequestError
from edge_runtime.policies import DraftLengthPolicy, Fixed
from edge_runtime.stats import DecodeStats
from edge_runtime.text import TextStream


def default_threads() -> int:
    """Returns how many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Generation:
    """One request: iterate it for text pieces, each the moment its tokens are accepted; `stats` and `tokens` grow meanwhile.

    Nothing runs before the first piece is asked for; leaving the loop early ends the request.
    """

    def __init__(self, session: Session, prompt: Sequence[int], policy: DraftLengthPolicy, max_tokens: int) -> None:
        self.stats = DecodeStats(prompt_tokens=len(prompt))
        self.tokens: list[int] = []
        self.prompt = list(prompt)
        self._session = session
        self._policy = policy
        self._max_tokens = max_tokens

    def __iter__(self) -> Iterator[str]:
        """Yields non-empty pieces of text until the request is done."""
        stream, vocabulary = TextStream(), self._session.vocabulary
        for one in self.rounds():
            if text := "".join(stream.feed(vocabulary.piece(token)) for token in one.tokens):
                yield text
        if text := stream.finish():
            yield text

    def rounds(self) -> Iterator[Round]:
        """Yields rounds of token ids, for those who want no text. Use either this or the pieces, once."""
        target, stats = self._session.target, self.stats
        begin = time.perf_counter()
        target.rollback(0)
        target.prefill(self.prompt[:-1])
        stats.prefill_seconds = time.perf_counter() - begin
        rounds = decode(
            target, self._session.drafter, self.prompt[-1], self._policy,
            max_tokens=self._max_tokens, stop=self._session.vocabulary.eog_tokens,
        )  # fmt: skip
        while True:
            begin = time.perf_counter()  # only the loop's own time counts, not what the caller does with a round
            one = next(rounds, None)
            if one is None:
                return
            stats.decode_seconds += time.perf_counter() - begin
            if not stats.rounds:
                stats.first_token_seconds = stats.prefill_seconds + stats.decode_seconds
            stats.count_round(one.drafted, one.accepted, len(one.tokens))
            self.tokens += one.tokens
            yield one

    def text(self) -> str:
        """Runs the request to its end and returns all text."""
        return "".join(self)


class Session:
    """An opened pair. One request at a time; not thread-safe."""

    def __init__(self, bundle: Bundle, target: Target, drafter: Drafter | None, vocabulary: Vocabulary) -> None:
        self.bundle = bundle
        self.target = target
        self.drafter = drafter
        self.vocabulary = vocabulary

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        draft_length: int | None = None,
        policy: DraftLengthPolicy | None = None,
    ) -> Generation:
        """Starts a greedy request on an empty cache. `prompt` is text or token ids.

        `draft_length` 0 is plain decoding; None takes the bundle's recommendation. Raises RequestError when the prompt does not fit.
        """
        ids = self.vocabulary.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError("the prompt has no tokens; give at least one (a beginning-of-sequence token will do)")
        if len(ids) >= self.target.context:
            raise RequestError(f"the prompt has {len(ids)} tokens, the context {self.target.context}; shorten it or raise --context")
        if max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens}; ask for at least 1")
        if policy is None:
            policy = Fixed(self.bundle.manifest.runtime.draft_length if draft_length is None else draft_length)
        return Generation(self, ids, policy, max_tokens)

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
    folder: Path | str, *, threads: int | None = None, context: int | None = None, draft: bool = True, check_hashes: bool = True,
    notify: Callable[[str], None] = lambda _: None,
) -> Session:  # fmt: skip
    """Opens a bundle on llama.cpp. `context` is in tokens; None takes the bundle's. `notify` gets one sentence about a first probe.

    The first use on a machine probes the library in a child process, since a build may crash on the processor it runs on.
    Raises BundleError and BackendError.
    """
    from edge_runtime.backends.llama_cpp import LlamaOptions, open_pair
    from edge_runtime.probe import probe_load_options

    bundle = open_bundle(folder, check_hashes=check_hashes)
    target, drafter = bundle.file("target", "gguf"), bundle.file("drafter", "gguf") if draft else None
    drafter_path = bundle.folder / drafter.path if drafter else None
    quantizations = [f.quantization or "unknown" for f in (target, drafter) if f]
    answer = probe_load_options(bundle.folder / target.path, drafter_path, quantizations, notify=notify)
    options = LlamaOptions(
        context=context or bundle.manifest.runtime.context, threads=threads or default_threads(), use_extra_bufts=answer.use_extra_bufts
    )
    llama_target, llama_drafter = open_pair(bundle.folder / target.path, drafter_path, options)
    return Session(bundle, llama_target, llama_drafter, llama_target.vocabulary)
