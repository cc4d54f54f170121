"""A session: a loaded pair that takes requests, with its settings and its monitor."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from edge_devices.waiting import Waiting, silent_wait
from edge_runtime.backends.interface import SingleSequence
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH, MediaInputs
from edge_runtime.calibration.measured import AcceptanceCache, exported_counts
from edge_runtime.config.settings import Settings, resolve_settings
from edge_runtime.decoding.loop import Round
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.drafting.acceptance_model import AcceptanceModel, PositionModel
from edge_runtime.drafting.cost_model import Costs
from edge_runtime.drafting.energy_objective import EnergyCosts, TimeBound
from edge_runtime.drafting.policies import DrafterKind, DraftLengthPolicy, Fixed, LimitedPolicy, SafetyNet, is_model
from edge_runtime.drafting.profit_policy import Profit, expected_rate
from edge_runtime.drafting.sources import TEXT_PRIORS, Proposals, SourceOdds, TextMemory, predicted_tokens
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import MediaTarget, SavableTarget, SequenceBatch
from edge_runtime.media.soft_rows import LazyEncoder, Media, MediaPrompt, checked_rows, media_prompt, with_places
from edge_runtime.session.generation import GREEDY_PARAMS, Generation, GenerationOptions, LoadedPair, sampled
from edge_runtime.session.load_options import OPENING, with_keywords
from edge_runtime.session.monitor import Monitor, MonitorOptions, RequestMonitor
from edge_runtime.session.prompt_cache import CachedPrompt, PromptCache
from edge_runtime.session.row_equality import RowEquality, known_row_equality
from edge_runtime.text.chat_template import Message, bundle_template
from edge_runtime.text.constraints import ConstraintSource
from edge_runtime.text.grammar import Constraint, grammars_for


@dataclass(frozen=True, kw_only=True)
class SessionParts(LoadedPair):
    """The parts of a session. `settings` None takes the bundle's recommendation; `monitor` None takes one without a log.

    `costs` is called when a policy that needs costs is first used. Without it, that policy drafts a fixed length with a safety net.
    `keep_costs` is called when the session closes.
    `acceptance_cache` has the acceptance model that `profit` starts with and updates. `encoder` computes the rows of images and sound.
    `row_kernels` names the variant of the project's own kernels; None means the standard ones. `device` is where the graphs run.
    `stock_attention` is as in `OpenedPair`.
    `prompt_cache` keeps the rows of prompts on disk.
    `fingerprint` identifies everything that an answer depends on, except its request.
    """

    bundle: Bundle
    drafter_kind: DrafterKind = "dense"
    backend: str = ""
    row_kernels: str | None = None
    device: str = "cpu"
    stock_attention: bool = False
    settings: Settings | None = None
    monitor: Monitor | None = None
    costs: Callable[[], Costs] | None = None
    keep_costs: Callable[[], None] = lambda: None
    acceptance_cache: AcceptanceCache | None = None
    encoder: LazyEncoder | None = None
    prompt_cache: PromptCache | None = None
    fingerprint: str = ""


class Session:
    """A loaded pair that runs one request at a time. `open_session` creates it.

    May be used from any thread: `Generation.text` calls wait for each other. A request that begins ends the one before it, which raises
    RequestError if it is continued. Use `open_sessions` for concurrent requests. After `close`, every call raises RequestError.
    """

    def __init__(self, parts: SessionParts) -> None:
        self.bundle = parts.bundle
        self.target = parts.target
        self.drafter = parts.drafter
        self.drafter_kind = parts.drafter_kind
        self.backend = parts.backend
        self.row_kernels = parts.row_kernels
        self.device = parts.device
        self.stock_attention = parts.stock_attention
        self.vocabulary = parts.vocabulary
        self.claim = parts.claim
        self.fingerprint = parts.fingerprint
        self.settings = parts.settings or resolve_settings([], parts.bundle)
        self.monitor = parts.monitor or Monitor(MonitorOptions(window=self.settings.window))
        self._parts = parts
        self._net = SafetyNet(window=self.settings.window)
        self._profit: Profit | None = None
        self._odds = SourceOdds(TEXT_PRIORS)

    @with_keywords(SamplingParams, GREEDY_PARAMS, elsewhere=OPENING)
    def generate(
        self,
        prompt: str | Sequence[int] | MediaPrompt,
        *,
        max_tokens: int = 128,
        min_tokens: int = 0,
        draft_length: int | None = None,
        policy: DraftLengthPolicy | None = None,
        sampling: SamplingParams = GREEDY_PARAMS,
        acceptance: str | None = None,
        stop: Sequence[str] = (),
        chunk_size: int | None = None,
        on_round: Callable[[Round], None] | None = None,
        reuse_prefix: bool = False,
        constraint: ConstraintSource | None = None,
        logprobs: int | None = None,
        compiled: Constraint | None = None,
        prediction: str | Sequence[int] = "",
        client: str = "",
        **keywords: Any,
    ) -> Generation:
        """Starts a request, greedy by default. `prompt` is text, token ids, or a `media_prompt`.

        Sampling is given as keywords (`temperature=0.7, seed=1`), as `SamplingParams`, or both; keywords win.
        `draft_length` 0 is plain decoding; a `policy` replaces it. With neither, the session's settings decide, with a safety net.
        `acceptance` is "coupled" or "block". "coupled" keeps the exact text of decoding without drafts; it is the default with a seed.
        "block" keeps the text's distribution; it is the default without a seed. `chunk_size` None takes the settings' value.
        With a `constraint` (a JsonSchema, Gbnf, Regex or ToolCalls) the text is always valid, with or without drafts. `compiled` is the
        result of `compile_constraint` for the `constraint`; each can be used for one request only. For other options, see
        `GenerationOptions`.
        `prediction` is a text, or its tokens, that the output is expected to repeat, whole or in parts; it only changes the speed.
        With `reuse_prefix`, a session with a prompt cache reads and writes rows there, separately for each `client`.
        Raises RequestError if the prompt does not fit, an option is out of range or of the wrong type, or the session is closed.
        Raises BackendError if a constraint's library is missing.
        """
        sampling = sampled(sampling, keywords)
        options = GenerationOptions(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            sampling=sampling,
            acceptance=acceptance,
            stop=stop,
            on_round=on_round,
            chunk_size=self.settings.chunk_size if chunk_size is None else chunk_size,
            reuse_prefix=reuse_prefix,
            constraint=constraint,
            logprobs=logprobs,
        )
        with self._open():
            ids = self._prompt_ids(prompt)
            vocabulary_size = self.bundle.manifest.architecture.vocab_size
            if sampling.logit_bias and max(sampling.logit_bias) >= vocabulary_size:
                raise RequestError(f"logit_bias names token {max(sampling.logit_bias)}; the vocabulary ends at {vocabulary_size - 1}")
            enforced = self.compile_constraint(constraint) if compiled is None else compiled
            monitor, proposals = RequestMonitor(self.monitor, self._log_settings(options, draft_length, policy)), None
            shares_policy = False
            if policy is None and draft_length is None:
                # `profit` knows the costs of drafts and needs no safety net, which would only interfere.
                if self._weighs_costs:
                    proposals = self._proposals([token for token in ids if token >= 0], prediction)
                if (policy := self.profit(assisted=proposals is not None)) is not None:
                    policy.begin_request()
                    shares_policy = True
                policy = policy or LimitedPolicy(self.settings.new_policy(), self._net, monitor.record_event)
            elif policy is None:
                policy = Fixed(self.draft_length_for(draft_length))
            prompt_ids = prompt if isinstance(prompt, MediaPrompt) else ids
            return Generation(
                self._parts,
                prompt_ids,
                policy=policy,
                options=options,
                monitor=monitor,
                constraint=enforced,
                proposals=proposals,
                cached=self._cached(ids, client) if reuse_prefix else None,
                shares_policy=shares_policy,
            )

    def resume(self, generation: Generation) -> None:
        """Continues a suspended request (`Generation.suspend`) on this session: its former one, or another of the same `open_sessions`.

        Ends the request that this session has. Raises as `Generation.resume` does.
        """
        with self._open():
            generation.resume(self._parts, self.profit(assisted=True) if generation.shares_policy else None)

    def _cached(self, prompt: Sequence[int], client: str) -> CachedPrompt | None:
        cache = self._parts.prompt_cache
        return cache.request(self.target, prompt[:-1], client) if cache is not None and isinstance(self.target, SavableTarget) else None

    @property
    def _weighs_costs(self) -> bool:
        """Whether the policy weighs drafts by their costs, so that it can also use drafts from other sources than the drafter."""
        return self.settings.needs_costs and self._parts.costs is not None

    def tokenize(self, text: str) -> list[int]:
        """Returns a text's token ids as `generate` uses them: with the beginning-of-sequence token; control tokens in it stay text."""
        with self._open():
            return self.vocabulary.encode(text)

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        """Counts the tokens of a text, or of chat messages ({"role": "user", "content": "..."}) in the bundle's template.

        Raises RequestError for messages that the template refuses.
        """
        if isinstance(prompt, str):
            return len(self.tokenize(prompt))
        with self._open():
            return len(bundle_template(self.bundle, self.vocabulary).encode(prompt))

    def _prompt_ids(self, prompt: str | Sequence[int] | MediaPrompt) -> list[int]:
        """Returns the prompt's token ids. Raises RequestError if it is neither text nor ids of the vocabulary, is empty, or too long."""
        if isinstance(prompt, str):
            ids = self.vocabulary.encode(prompt)
        elif isinstance(prompt, MediaPrompt):
            _checked_ids(prompt.text_ids, self.bundle.manifest.architecture.vocab_size)
            ids = prompt.ids
        else:
            ids = _checked_ids(prompt, self.bundle.manifest.architecture.vocab_size)
        if not ids:
            raise RequestError("the prompt has no tokens; give at least one (a beginning-of-sequence token is enough)")
        if len(ids) >= self.target.context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, the context {self.target.context}; shorten it,"
                " or open the bundle with a larger context (--context)"
            )
        return ids

    def compile_constraint(self, constraint: ConstraintSource | None) -> Constraint | None:
        """Returns the compiled constraint for one request, in its initial state; None for None.

        Any thread may call this, even while a request runs. Raises RequestError if the constraint cannot be compiled within the limits,
        BackendError if its library is missing.
        """
        if constraint is None:
            return None
        return grammars_for(self.vocabulary, self.bundle.manifest.architecture.vocab_size).constrain(constraint)

    def media_prompt(self, prompt: str | Sequence[int], media: Sequence[Media], client: int = 0) -> MediaPrompt:
        """Returns a prompt with images and sound for `generate`. Nothing is encoded before the request runs.

        In a prompt of ids, each placeholder of the vocabulary (`<|image|>`, `<|audio|>`) is replaced by the next media. With a text, all
        media come before it, in order. Encoded rows are kept for the same `client` alone. Raises RequestError if the bundle has no encoder,
        or for a wrong number of media.
        """
        inputs, encoder = self._media_parts()
        for item in media:
            self.media_rows(item)
        if isinstance(prompt, str):
            prompt = with_places(self.vocabulary.encode(prompt), media, inputs, self.vocabulary.bos)
        return media_prompt(prompt, media, inputs, encoder, client)

    def check_media(self) -> None:
        """Raises RequestError if the bundle has no encoder for this backend."""
        self._media_parts()

    def media_rows(self, media: Media) -> int:
        """Returns how many tokens of the context an image or a sound takes.

        Raises RequestError if the bundle has no encoder for it, or if the image is too large for this session.
        """
        inputs, _ = self._media_parts()
        return checked_rows(media, inputs, self.target.whole_rows if isinstance(self.target, MediaTarget) else 0)

    def _media_parts(self) -> tuple[MediaInputs, LazyEncoder]:
        inputs, encoder = self.bundle.manifest.media, self._parts.encoder
        if inputs is None or encoder is None:
            missing = "this bundle has no encoder of images and sound for this backend; export it again with --media f16"
            raise RequestError(f"image input is not supported, nor is sound: {missing}")  # clients recognize these words
        return inputs, encoder

    def _proposals(self, prompt: Sequence[int], prediction: str | Sequence[int]) -> Proposals | None:
        """Returns a further source of drafts, which are copied from the text. Prompt lookup needs none, as it copies them itself."""
        drafts = self.drafter is not None and is_model(self.drafter_kind)
        if not (drafts or prediction):
            return None
        return Proposals(TextMemory(prompt, self._predicted_ids(prediction)), self._odds)

    def _predicted_ids(self, prediction: str | Sequence[int]) -> list[int]:
        if isinstance(prediction, str):
            return predicted_tokens(prediction, self.vocabulary, self.target.context)
        return _checked_ids(prediction, self.bundle.manifest.architecture.vocab_size)

    def profit(self, *, assisted: bool = False) -> Profit | None:
        """Returns the session's `profit` policy, which learns from request to request.

        Returns None if another policy is configured, or if there is neither a drafter nor another source of drafts (`assisted`).
        """
        with self._open():
            if self.drafter is None and not assisted:
                return None
            if self._profit is None and self._parts.costs is not None and self._weighs_costs:
                self._profit = self._new_profit(self._parts.costs)
            return self._profit

    def _new_profit(self, measured: Callable[[], Costs]) -> Profit:
        longest = min(self.settings.longest, self.settings.longest_draft) if self.drafter else 0
        stepwise = self.drafter is not None and self.drafter.stepwise
        cached = self._parts.acceptance_cache
        learned = cached.model if cached else AcceptanceModel()
        rows = self.target.length
        costs = measured()
        if self.target.length != rows:  # measuring costs with a meter has emptied the cache
            self.claim.release()
        model = learned if stepwise else PositionModel()
        slowdown = costs.slowdown if isinstance(costs, EnergyCosts) else None
        bound = TimeBound(costs, slowdown) if isinstance(costs, EnergyCosts) and slowdown is not None else None
        return Profit(costs, model, longest=longest, stepwise=stepwise, max_rows=self.settings.longest_draft, bound=bound)

    def costs(self) -> Costs:
        """Returns the costs of drafts and verifies. Raises RequestError for a session that was opened without costs."""
        if self._parts.costs is None:
            raise RequestError("this session was opened without costs")
        return self._parts.costs()

    def expected_rate(self) -> float:
        """Returns the tokens per second, or per joule, that the policy's rounds should reach with the exported acceptance rates.

        Raises RequestError without costs.
        """
        with self._open():
            return rate_with(self.costs(), self.bundle, self.settings, drafts=self.drafter is not None)

    def row_equality(
        self, notify: Callable[[str], None] = lambda _: None, waiting: Waiting = silent_wait, *, batch: SequenceBatch | None = None
    ) -> RowEquality:
        """Returns whether rows have the same bits alone and in a verify. This is compared on first use, which empties the KV cache.

        `batch` has all sequences of the context; None stands for this session's sequence alone.
        """
        with self._open():
            self.claim.release()
            batch, longest = batch or SingleSequence(self.target, self.drafter), self.settings.longest_draft + 1
            return known_row_equality(self.fingerprint, batch, longest, notify, waiting, stock_attention=self.stock_attention)

    def with_policy(self, name: str) -> Session:
        """Returns a session on the same loaded pair with another drafting policy, and with its own safety net and monitor."""
        return Session(replace(self._parts, settings=replace(self.settings, policy=name), monitor=None))

    def draft_length_for(self, requested: int | None) -> int:
        """Returns the requested draft length, or the settings' one if None. Raises RequestError if a verify cannot have that many rows."""
        longest = self.settings.longest_draft
        if requested is not None and (not isinstance(requested, int) or isinstance(requested, bool)):
            raise RequestError(f"draft_length is {requested!r}, not a whole number; give an int of 0 to {longest}")
        if requested is not None and longest < requested <= MAX_DRAFT_LENGTH:
            raise RequestError(f"draft length {requested} is above longest_draft {longest}; draft at most {longest} or raise it")
        return self.settings.draft_length if requested is None else requested

    def record(self, generation: Generation) -> dict[str, Any]:
        """Counts a finished request, appends its record to the monitor's log if there is one, and returns the record."""
        with self.claim.lock.held():
            return self.monitor.record_request(generation.monitor, generation.stats, finish_reason=generation.finish_reason)

    def _log_settings(self, options: GenerationOptions, draft_length: int | None, policy: DraftLengthPolicy | None) -> dict[str, Any]:
        """Returns a request's settings for the log, without any text of prompt or answer."""
        values = {**self.settings.to_json(), "drafter": self.drafter_kind, "context": self.target.context, "chunk_size": options.chunk_size}
        if policy is not None:
            values["policy"] = type(policy).__name__.lower()
        elif draft_length is not None:
            values |= {"policy": "fixed", "draft_length": draft_length}
        return {**values, "max_tokens": options.max_tokens, "acceptance": options.acceptance, "sampling": options.sampling.to_json()}

    @property
    def costs_are_provisional(self) -> bool | None:
        """Whether the costs of drafts were computed or learned from rounds instead of measured; None if no policy uses costs."""
        return self._parts.costs().is_provisional if self._profit is not None and self._parts.costs is not None else None

    def save_learned(self) -> None:
        """Writes the acceptance and the costs that were learned from requests to the user's cache, for the next session."""
        if self._parts.acceptance_cache:
            self._parts.acceptance_cache.save()
        self._parts.keep_costs()

    def close_prompt_cache(self) -> None:
        """Waits until the prompt cache has written everything."""
        if self._parts.prompt_cache is not None:
            self._parts.prompt_cache.close()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wraps direct use of `target`. Other threads wait, and a paused request cannot continue afterwards."""
        with self._open():
            self.claim.release()
            yield

    def close(self) -> None:
        """Saves the acceptance model and frees the models; one of several sessions only empties its own cache. Can be called twice."""
        with self.claim.lock.held():
            self.claim.lock.require_idle()
            if self.claim.closed or self.claim.lock.closed:
                return
            self.save_learned()
            self.claim.closed = True
            self.claim.release()
            if not self.claim.alone:
                self.target.rollback(0)
                return
            self.claim.lock.closed = True
            self.close_prompt_cache()
            if self._parts.encoder is not None:
                self._parts.encoder.close()
            if self.drafter is not None:
                self.drafter.close()
            self.target.close()

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Waits for other threads. Raises RequestError if the session is closed, or during one of its forwards."""
        with self.claim.lock.held():
            self.claim.lock.require_idle()
            self.claim.require_open()
            yield

    def __repr__(self) -> str:
        architecture = self.bundle.manifest.architecture
        state = "closed" if self.claim.closed or self.claim.lock.closed else f"context {self.target.context}, drafter {self.drafter_kind}"
        return f"<Session {self.bundle.folder.name}: {architecture.family}, {architecture.parameters:,} parameters, {state}>"

    def __enter__(self) -> Self:
        self.claim.require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rate_with(costs: Costs, bundle: Bundle, settings: Settings, *, drafts: bool) -> float:
    """Returns the tokens per unit of cost that the policy's rounds should reach with the exported acceptance rates."""
    longest = min(settings.longest, settings.longest_draft)
    lengths = range(longest + 1) if settings.needs_costs else [min(settings.draft_length, longest)]
    model = AcceptanceModel.from_json(exported_counts(bundle.manifest, bundle.manifest.parity)) or AcceptanceModel()
    return expected_rate(costs, model, lengths if drafts else [0])


def _checked_ids(prompt: Sequence[int], vocabulary_size: int) -> list[int]:
    """Returns token ids as ints. Raises RequestError for anything else: bytes would pass as ids, and a list of texts would fail late."""
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping) or not isinstance(prompt, Iterable):
        raise RequestError(f"the prompt is of type {type(prompt).__name__}; give a str, or a sequence of token ids")
    ids = []
    for token in prompt:
        try:
            ids.append(operator.index(token))
        except TypeError:
            ids.append(-1)
        if isinstance(token, bool) or not 0 <= ids[-1] < vocabulary_size:
            raise RequestError(f"the prompt has {token!r}, which is no token id; give a str, or ids of 0 to {vocabulary_size - 1}")
    return ids
