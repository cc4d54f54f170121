"""A session: an opened pair that takes requests, with its settings and its monitor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.calibration.acceptance_cache import AcceptanceCache
from edge_runtime.config.settings import Settings, resolve_settings
from edge_runtime.decoding.acceptance_rules import DEFAULT_ACCEPTANCE
from edge_runtime.decoding.loop import Round
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.drafting.acceptance_model import AcceptanceModel, PositionModel
from edge_runtime.drafting.cost_model import Costs
from edge_runtime.drafting.drafter_kinds import DrafterKind
from edge_runtime.drafting.policies import DraftLengthPolicy, Fixed
from edge_runtime.drafting.profit_policy import Profit
from edge_runtime.drafting.safety_net import Guarded, SafetyNet
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Drafter, Target, Vocabulary
from edge_runtime.session.generation import GREEDY_PARAMS, Generation, GenerationOptions, OpenedPair
from edge_runtime.session.kv_state_file import load_state, save_state
from edge_runtime.session.monitor import Monitor, MonitorOptions
from edge_runtime.text.constraints import ConstraintSource
from edge_runtime.text.grammar import grammars_for


class Session:
    """An opened pair. One request at a time; not thread-safe."""

    def __init__(
        self,
        bundle: Bundle,
        target: Target,
        drafter: Drafter | None,
        vocabulary: Vocabulary,
        drafter_kind: DrafterKind = "dense",
        settings: Settings | None = None,
        monitor: Monitor | None = None,
        costs: Callable[[], Costs] | None = None,
        memory: AcceptanceCache | None = None,
    ) -> None:
        """`settings` None takes the bundle's recommendation; `monitor` None one that only counts. `costs` is asked once, when the
        policy `profit` is first used: without it that policy drafts a fixed length over the safety net. `memory` is what that policy
        begins with and leaves to the next session.
        """
        self.bundle = bundle
        self.target = target
        self.drafter = drafter
        self.drafter_kind = drafter_kind
        self.vocabulary = vocabulary
        self.settings = settings or resolve_settings([], bundle)
        self.monitor = monitor or Monitor(MonitorOptions(window=self.settings.window))
        self._net = SafetyNet(window=self.settings.window)
        self._costs = costs
        self._memory = memory
        self._profit: Profit | None = None

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
        chunk_size: int | None = None,
        on_round: Callable[[Round], None] | None = None,
        reuse_prefix: bool = False,
        constraint: ConstraintSource | None = None,
    ) -> Generation:
        """Starts a request, greedy unless `sampling` says otherwise. `prompt` is text or token ids.

        `draft_length` 0 is plain decoding; a `policy` decides instead of it. With neither the session's settings decide, over a safety
        net. `acceptance` is "rejection" or "match": both leave the target's distribution as it is. `chunk_size` None takes the
        settings' one. With a `constraint` (a JsonSchema, Gbnf or Regex) the text is always valid; drafts change it as little as without
        one. For the rest see `GenerationOptions`.
        Raises RequestError when the prompt does not fit or an option makes no sense, BackendError if a constraint's library is missing.
        """
        options = GenerationOptions(
            max_tokens=max_tokens,
            sampling=sampling,
            acceptance=acceptance,
            stop=stop,
            on_round=on_round,
            chunk_size=self.settings.chunk_size if chunk_size is None else chunk_size,
            reuse_prefix=reuse_prefix,
            constraint=constraint,
        )
        ids = self.vocabulary.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError("the prompt has no tokens; give at least one (a beginning-of-sequence token will do)")
        if len(ids) >= self.target.context:
            raise RequestError(f"the prompt has {len(ids)} tokens, the context {self.target.context}; shorten it or raise --context")
        vocabulary_size = self.bundle.manifest.architecture.vocab_size
        if sampling.logit_bias and max(sampling.logit_bias) >= vocabulary_size:
            raise RequestError(f"logit_bias names token {max(sampling.logit_bias)}; the vocabulary ends at {vocabulary_size - 1}")
        enforced = None if constraint is None else grammars_for(self.vocabulary, vocabulary_size).constrain(constraint)
        watch = self.monitor.watch(self._said_of_request(options, draft_length, policy))
        if policy is None and draft_length is None:
            # Profit weighs what drafts cost here; the net, which does not, would only be in its way.
            policy = self.profit() or Guarded(self.settings.new_policy(), self._net, watch.report)
        elif policy is None:
            policy = Fixed(self.draft_length_for(draft_length))
        pair = OpenedPair(target=self.target, drafter=self.drafter, vocabulary=self.vocabulary)
        return Generation(pair, ids, policy, options, watch, enforced)

    def profit(self) -> Profit | None:
        """Returns the session's `profit` policy, which learns from request to request; None if another one is configured."""
        if self._profit is None and self.settings.policy == "profit" and self._costs and self.drafter:
            longest = min(self.settings.longest, self.settings.longest_draft)
            stepwise = self.drafter.stepwise
            learned = self._memory.model if self._memory else AcceptanceModel()
            self._profit = Profit(self._costs(), learned if stepwise else PositionModel(), longest=longest, stepwise=stepwise)
        return self._profit

    def with_policy(self, name: str) -> Session:
        """Returns a session on the same opened pair that drafts by another policy, with a safety net and a monitor of its own."""
        settings = replace(self.settings, policy=name)
        return Session(
            self.bundle, self.target, self.drafter, self.vocabulary, self.drafter_kind, settings, costs=self._costs, memory=self._memory
        )

    def draft_length_for(self, asked: int | None) -> int:
        """Returns the draft length asked for, or the settings' first one. Raises RequestError if it needs more rows than a verify has."""
        longest = self.settings.longest_draft
        if asked is not None and longest < asked <= MAX_DRAFT_LENGTH:
            raise RequestError(
                f"draft length {asked} needs {asked + 1} rows, but parallel_batch_size is {longest + 1}; draft at most {longest} or raise it"
            )
        return self.settings.start if asked is None else asked

    def record(self, generation: Generation) -> dict[str, Any]:
        """Counts a request that is over; appends its line to the monitor's log, if it has one, and returns what the line says."""
        return self.monitor.record_request(generation.watch, generation.stats, finish_reason=generation.finish_reason)

    def _said_of_request(self, options: GenerationOptions, draft_length: int | None, policy: DraftLengthPolicy | None) -> dict[str, Any]:
        """Returns a request's settings for the log: no text, neither of the prompt nor of the answer."""
        said = {**self.settings.to_json(), "drafter": self.drafter_kind, "context": self.target.context, "chunk_size": options.chunk_size}
        if policy is not None:
            said["policy"] = type(policy).__name__.lower()
        elif draft_length is not None:
            said |= {"policy": "fixed", "start": draft_length}
        return {**said, "max_tokens": options.max_tokens, "acceptance": options.acceptance, "sampling": options.sampling.to_json()}

    def save_state(self, path: Path | str) -> None:
        """Writes the K/V rows with their tokens to a file. Raises RequestError if there are none or it cannot be written."""
        save_state(Path(path), self.target, self.bundle)

    def load_state(self, path: Path | str) -> None:
        """Puts the K/V rows of a file that `save_state` wrote into the cache, in place of what is there.

        A request with `reuse_prefix` whose prompt begins with `target.tokens` then goes on from them. Beyond the sliding window a
        file holds only what the next token needs: a prompt that ends more than a token earlier is computed anew. Drafts begin after the
        first verify. Raises RequestError if the file is damaged or not of this target, KV type or context; then nothing has changed.
        """
        self.profit()  # measuring costs would empty the cache later
        load_state(Path(path), self.target, self.bundle)

    def remember(self) -> None:
        """Leaves what was learned of drafts to the next session."""
        if self._memory:
            self._memory.save()

    def close(self) -> None:
        """Frees the models; remembers what was learned of drafts."""
        self.remember()
        if self.drafter is not None:
            self.drafter.close()
        self.target.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
