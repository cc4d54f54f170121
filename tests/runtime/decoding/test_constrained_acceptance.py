"""Constrained output with drafts equals constrained plain decoding: token for token when greedy, by enumeration when sampled."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")

from edge_runtime.decoding.acceptance import ACCEPTANCE_METHODS, GREEDY, BlockRule, CoupledRule, acceptance_rule, constrained
from edge_runtime.decoding.sampling import Sampler, SamplingParams
from edge_runtime.drafting.sources import LookupDrafter
from edge_runtime.errors import RequestError
from edge_runtime.text import grammar, matcher
from edge_runtime.text.constraints import Regex
from edge_runtime.text.grammar import Grammars
from enumeration import Choices, distribution_of, enumerated_rule
from stochastic import StochasticDrafter, StochasticTarget, drafters, largest_difference, random_rows, write
from tables import TableVocabulary

# "ab" may be spelled in two ways, and 6 is the end.
VOCABULARY = TableVocabulary([b"a", b"b", b"c", b"ab", b"ca", b"", b"<eos>"], frozenset({6}))
GRAMMARS = Grammars(VOCABULARY, VOCABULARY.size)
END, SIZE, PROMPT = 6, VOCABULARY.size, [1, 2]
TARGET = random_rows(1, SIZE)
RULES = (BlockRule, CoupledRule)
PARAMS = SamplingParams(temperature=0.9, top_k=4, presence_penalty=0.4)
# The first is whole at many places, the second closes by itself, the third forces most tokens.
PATTERNS = ["(ab|c)*", "[ab]{2,4}c", "a(bca)*b?"]

DRAFTERS = {**drafters(TARGET, SIZE), "lookup": LookupDrafter}


# In this process, so that a compiled matcher can be copied for each of thousands of runs.
LIBRARY = matcher.llguidance_module()
TOKENIZER = matcher.new_tokenizer(LIBRARY, grammar._pieces(VOCABULARY, SIZE), [END], [grammar._STRING])


@functools.cache
def compiled(pattern: str):
    return matcher.new_matcher(LIBRARY, TOKENIZER, grammar._HEADER + GRAMMARS._lark(Regex(pattern)))


def constrain(pattern: str) -> grammar.Constraint:
    """A constraint at its beginning, compiled once."""
    return grammar.Constraint(compiled(pattern).deep_copy(), VOCABULARY.eog_tokens, SIZE)


def run(target, drafter, rule, pattern: str, *, length: int, tokens: int = 4) -> tuple[int, ...]:
    constraint = constrain(pattern)
    return write(target, drafter, PROMPT, constrained(rule, constraint), length=length, tokens=tokens, is_stop=constraint.advance)


def masked_greedy(row, pattern: str, tokens: int) -> tuple[int, ...]:
    """The reference: one token at a time, every row masked."""
    constraint, out = constrain(pattern), []
    while len(out) < tokens:
        out.append(int(np.where(constraint.allowed(()), row([*PROMPT, *out]), -np.inf).argmax()))
        if constraint.advance(out[-1]):
            break
    return tuple(out)


def exact(params: SamplingParams, pattern: str, tokens: int) -> dict[tuple[int, ...], float]:
    """Probability of each sequence that constrained plain sampling can write, by enumeration."""
    sampler, done = Sampler(params), {}
    open_ends: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        longer = {}
        for sequence, probability in open_ends.items():
            constraint = constrain(pattern)
            for token in sequence:
                constraint.advance(token)
            context = [*PROMPT, *sequence]
            following = sampler(np.where(constraint.allowed(()), TARGET(context), -np.inf).astype(np.float32), context)
            for token, share in zip(following.tokens.tolist(), following.probabilities.tolist(), strict=True):
                over = token == END or constraint.closed([token])
                (done if over else longer)[(*sequence, token)] = probability * share
        open_ends = longer
    return done | open_ends


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_equals_plain_greedy(pattern, drafter):
    for seed in range(4):
        row = random_rows(seed, SIZE)
        expected = masked_greedy(row, pattern, 30)
        for length in (0, 1, 3, 8):
            target = StochasticTarget(row)
            opened = DRAFTERS[drafter](target) if length else None
            assert run(target, opened, GREEDY, pattern, length=length, tokens=30) == expected


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_drafter_keeps_the_distribution(pattern, drafter, rule, monkeypatch):
    """By enumeration of everything that the implementation can do."""
    tokens = 4 if rule is BlockRule else 3  # the draws of the coupled rule multiply

    def once(choices: Choices) -> tuple[int, ...]:
        target = StochasticTarget(TARGET)
        opened = DRAFTERS[drafter](target) if drafter else None
        return run(target, opened, enumerated_rule(rule, Sampler(PARAMS), PROMPT, choices), pattern, length=2, tokens=tokens)

    assert largest_difference(distribution_of(once, monkeypatch), exact(PARAMS, pattern, tokens)) < 1e-12


@pytest.mark.parametrize("method", ACCEPTANCE_METHODS)
def test_a_drafter_that_is_the_target_is_always_right(method):
    """Drafts are masked as the target is, so nothing is rejected."""
    params = SamplingParams(temperature=0, presence_penalty=0.5, penalty_window=3)
    target = StochasticTarget(TARGET)
    rule = acceptance_rule(params, method, PROMPT)
    tokens = run(target, StochasticDrafter(target, TARGET), rule, "[abc]*", length=4, tokens=50)
    assert len(target.rows) == -(-len(tokens) // 5)


class Watching(StochasticTarget):
    """Verifies only what the pattern admits behind the tokens that were emitted."""

    def __init__(self, pattern: str) -> None:
        super().__init__(TARGET)
        self._pattern = pattern
        self.emitted: list[int] = []

    def verify(self, tokens):
        before = constrain(self._pattern)
        for token in self.emitted:
            before.advance(token)
        assert before.valid(tokens[1:]) == len(tokens) - 1
        return super().verify(tokens)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("method", [None, *ACCEPTANCE_METHODS])
def test_drafts_that_violate_the_grammar_never_reach_the_target(drafter, method):
    for pattern in PATTERNS:
        target, constraint = Watching(pattern), constrain(pattern)
        rule = acceptance_rule(SamplingParams(seed=3), method, PROMPT) if method else GREEDY

        def is_stop(token: int, target: Watching = target, constraint: grammar.Constraint = constraint) -> bool:
            target.emitted.append(token)
            return constraint.advance(token)

        write(target, DRAFTERS[drafter](target), PROMPT, constrained(rule, constraint), length=6, tokens=40, is_stop=is_stop)
        assert target.emitted


def test_a_drafter_without_a_valid_candidate_ends_its_draft():
    constraint = constrain("ab")
    for rule in (
        GREEDY,
        acceptance_rule(SamplingParams(seed=1), "block", PROMPT),
        acceptance_rule(SamplingParams(seed=1), "coupled", PROMPT),
    ):
        sampler = constrained(rule, constraint).sampler
        assert sampler is not None
        logits = np.array([3.0, 2.0], dtype=np.float32)
        assert sampler(logits, np.array([2, 4])) is None
        assert sampler(logits, np.array([2, 0])) == 0
        assert sampler(logits, np.array([0, 1])) == 1
        assert sampler(logits, np.array([0, 1])) is None  # the text is closed: nothing to draft


def test_a_ban_of_the_drafters_last_candidate_ends_its_draft_too():
    params = SamplingParams(logit_bias={0: -np.inf}, seed=1)
    sampler = constrained(acceptance_rule(params, "block", PROMPT), constrain("[abc]+")).sampler
    assert sampler is not None
    assert sampler(np.array([3.0], dtype=np.float32), np.array([0])) is None


def test_a_ban_of_all_that_is_valid_is_refused():
    target = StochasticTarget(TARGET)
    rule = acceptance_rule(SamplingParams(logit_bias={0: -np.inf}), "block", PROMPT)
    with pytest.raises(RequestError, match="no token can be drawn"):
        run(target, None, rule, "a+", length=0)


def test_a_model_without_finite_logits_is_refused():
    target = StochasticTarget(lambda context: np.full(SIZE, np.nan, np.float32))
    with pytest.raises(RequestError, match="no finite logit"):
        run(target, None, GREEDY, "b+", length=0)


def test_the_request_ends_with_the_token_that_closes_the_text():
    for length in (0, 2, 5):
        target = StochasticTarget(TARGET)
        drafter = StochasticDrafter(target, TARGET) if length else None
        tokens = run(target, drafter, GREEDY, "[ab]{2,4}c", length=length, tokens=30)
        assert VOCABULARY.text(list(tokens)).endswith("c")
        assert END not in tokens


def test_the_targets_logits_stay_as_they_are():
    rows = np.stack([TARGET([1, 2]), TARGET([2, 0])])
    before = rows.copy()
    for rule in (GREEDY, acceptance_rule(SamplingParams(seed=1), "block", PROMPT)):
        constrained(rule, constrain("a+")).accept([0], rows)
        assert np.array_equal(rows, before)
