"""What a backend is: each opens the shipped pair by the same request, and its rows, drafts, refusals and states behave the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_devices.waiting import silent_wait
from edge_runtime.backends.interface import Backend, OpenedPair, OpenRequest
from edge_runtime.backends.kernels.loader import variant
from edge_runtime.backends.selection import CARDS, check_options, load_backend
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.config.schema import DrafterConfig, SpeculativeConfig
from edge_runtime.config.settings import load_settings
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.errors import EdgeRuntimeError, RequestError
from edge_runtime.interfaces import Drafter, KvRows, SavableTarget, Target
from edge_runtime.media.encoder_inputs import DEFAULT_BUDGET
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

CONTEXT = 1024
# Logits of the pair reach about 10. Kernels of llama.cpp differ by the number of rows, and its caches are float16.
TOLERANCES = {"llama": 0.03, "onnx": 1e-4}
NEAR_TIE = 0.08
PROMPT = "def add(a, b):\n    return"


@dataclass(frozen=True)
class Case:
    """A backend and a bundle that it runs."""

    kind: str
    bundle: Path

    @property
    def backend(self) -> Backend:
        return load_backend(self.kind)

    def request(self, **changes: Any) -> OpenRequest:
        bundle = open_bundle(self.bundle)
        values: dict[str, Any] = {
            "bundle": bundle,
            "settings": load_settings(bundle, context=CONTEXT),
            "sequences": 1,
            "threads": 1,
            "drafter": None,
            "kv_type": None,
            "memory_limit": None,
            "image_rows": DEFAULT_BUDGET,
            "device": None,
            "notify": lambda _: None,
            "waiting": silent_wait,
        }
        return OpenRequest(**values | changes)

    def assert_same(self, ours: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(ours, expected, atol=TOLERANCES[self.kind])
        top = np.sort(ours, axis=1)
        clear = top[:, -1] - top[:, -2] > NEAR_TIE
        assert (ours.argmax(1) == expected.argmax(1))[clear].all()
        assert clear.any()


@pytest.fixture(scope="module", params=["llama", "onnx", "onnx-int8", "onnx-static"])
def case(request: pytest.FixtureRequest, probe_memory: None) -> Case:
    if request.param == "llama":
        return Case("llama", request.getfixturevalue("exported_pair"))
    onnx_pair: Callable[..., Path] = request.getfixturevalue("onnx_pair")
    if request.param == "onnx-int8" and variant() is None:
        pytest.skip("the row kernels were not built, and onnxruntime's own products of int8 differ by up to 0.2")
    changes = {"device": "static"} if request.param == "onnx-static" else {}
    return Case("onnx", onnx_pair("int8" if request.param == "onnx-int8" else "f32", **changes))


@pytest.fixture(scope="module")
def opened(case: Case) -> Iterator[OpenedPair]:
    opened = case.backend.open(case.request())
    yield opened
    opened.batch.close()


@pytest.fixture
def target(opened: OpenedPair) -> Target:
    opened.batch.targets[0].rollback(0)
    return opened.batch.targets[0]


@pytest.fixture
def drafter(opened: OpenedPair) -> Drafter:
    assert opened.drafters[0] is not None
    return opened.drafters[0]


@pytest.fixture(scope="module")
def session(case: Case) -> Iterator[Session]:
    with open_session(case.bundle, backend=case.kind, threads=1, context=256) as opened:
        yield opened


def random_tokens(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(300, 4096) for _ in range(count)]


def test_a_pair_has_what_its_request_asked_for(case: Case, opened: OpenedPair) -> None:
    assert len(opened.batch.targets) == len(opened.drafters) == 1
    assert opened.drafter_kind in ("dense", "split")
    assert opened.batch.targets[0].context == CONTEXT
    assert opened.vocabulary.encode(PROMPT)
    plain = case.backend.open(case.request(drafter="none"))
    assert (plain.drafters[0], plain.drafter_kind) == (None, "none")
    plain.batch.close()


@pytest.mark.parametrize("before", [1, 300])
def test_rows_together_equal_one_by_one(case: Case, target: Target, before: int) -> None:
    tokens = random_tokens(1, before + 13)
    target.prefill(tokens[:before])
    batch = target.verify(tokens[before:]).copy()
    assert batch.shape == (13, 4096)
    assert batch.dtype == np.float32
    target.rollback(before)
    single = np.stack([target.verify([token])[0].copy() for token in tokens[before:]])
    case.assert_same(batch, single)
    assert target.tokens.tolist() == tokens


@pytest.mark.parametrize("before", [20, 500])
def test_rows_that_were_rolled_back_can_be_verified_again(case: Case, target: Target, before: int) -> None:
    tokens = random_tokens(2, before + 13)
    target.prefill(tokens[:before])
    first = target.verify(tokens[before:]).copy()
    for _ in range(3):
        target.rollback(before + 1)
        target.verify(random_tokens(3, 12))
        target.rollback(before + 1)
        assert target.length == before + 1
        case.assert_same(first[1:], target.verify(tokens[before + 1 :]))


def test_a_rollback_to_rows_that_are_gone_is_refused_and_changes_nothing(case: Case, target: Target) -> None:
    tokens = random_tokens(5, 1001)
    target.prefill(tokens[:1000])
    assert 100 < target.rollback_floor <= 1000 - target.rewind_slack
    with pytest.raises(RequestError, match="cannot roll back 900 rows to 100"):
        target.rollback(100)
    after = target.verify(tokens[1000:]).copy()
    target.rollback(0)
    target.prefill(tokens[:1000])
    case.assert_same(after, target.verify(tokens[1000:]))
    rewound = 1001 - target.rewind_slack
    target.rollback(rewound)
    target.prefill(tokens[rewound:1000])
    case.assert_same(after, target.verify(tokens[1000:]))


def test_a_prefill_may_have_any_length_and_equals_verifies(case: Case, target: Target, drafter: Drafter) -> None:
    tokens = random_tokens(6, 131)
    for first in range(0, 130, 13):
        target.verify(tokens[first : first + 13])
    by_verify = target.verify(tokens[130:]).copy()
    drafts = drafter.draft(300, 3)
    target.rollback(0)
    target.prefill(tokens)
    assert target.length == 131
    assert drafter.draft(300, 3) == drafts
    target.rollback(130)
    case.assert_same(by_verify, target.verify(tokens[130:]))
    target.prefill([])
    assert target.length == 131


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 513])
def test_rows_that_nobody_reads_change_nothing_that_follows(case: Case, target: Target, drafter: Drafter, count: int) -> None:
    """A piece that another one follows has no row to draft from, whatever its length; the last one has."""
    tokens = random_tokens(7, count + 14)
    target.prefill(tokens[:count])
    target.prefill(tokens[count : count + 1])
    drafts, logits = drafter.draft(300, 5), target.verify(tokens[count + 1 :]).copy()
    target.rollback(0)
    target.prefill(tokens[:count], rows_read=0)
    assert drafter.draft(300, 5) == []
    target.prefill(tokens[count : count + 1])
    assert drafter.draft(300, 5) == drafts
    assert len(drafts) == 5
    assert np.array_equal(target.verify(tokens[count + 1 :]), logits)


def test_drafts_leave_the_cache_as_it_is(case: Case, target: Target, drafter: Drafter) -> None:
    tokens = random_tokens(9, 213)
    target.prefill(tokens[:200])
    plain = target.verify(tokens[200:]).copy()
    target.rollback(0)
    target.prefill(tokens[:200])
    drafts = drafter.draft(tokens[200], 12)
    assert len(drafts) == 12
    assert target.length == 200
    assert drafter.draft(tokens[200], 12) == drafts
    case.assert_same(plain, target.verify(tokens[200:]))


def test_the_drafter_follows_the_last_kept_row_or_drafts_nothing(target: Target, drafter: Drafter) -> None:
    assert drafter.draft(5, 3) == []
    tokens = random_tokens(10, 60)
    target.prefill(tokens[:50])
    assert drafter.draft(5, 0) == []
    target.verify(tokens[50:58])
    target.rollback(53)
    after_rollback = drafter.draft(tokens[53], 3)
    target.rollback(0)
    target.prefill(tokens[:53])
    assert drafter.draft(tokens[53], 3) == after_rollback
    target.verify(tokens[53:58])
    target.rollback(53)  # the hidden row before the newest forward is gone
    assert drafter.draft(5, 3) == []
    target.verify(tokens[53:55])
    assert len(drafter.draft(5, 3)) == 3


def test_a_host_may_pick_drafts_and_end_them(target: Target, drafter: Drafter) -> None:
    target.prefill(random_tokens(15, 30))
    picks: Iterator[int | None] = iter([301, 302, None, 303])
    assert drafter.draft(300, 6, lambda logits, tokens=None: next(picks)) == [301, 302]
    whole, chances = drafter.draft(300, 6), []

    def twice(chance: float) -> bool:
        chances.append(chance)
        return len(chances) < 2

    assert drafter.draft(300, 6, should_continue=twice) == whole[:2]
    assert all(0 < chance <= 1 for chance in chances)
    offered: list[tuple[np.ndarray, np.ndarray]] = []

    def pick(rank: int, logits: np.ndarray, tokens: np.ndarray | None = None) -> int:
        offered.append((logits.copy(), np.arange(len(logits)) if tokens is None else tokens.copy()))
        return int(offered[-1][1][np.argsort(logits)[-rank]])

    assert drafter.draft(300, 6, partial(pick, 1)) == whole
    assert all(np.isfinite(scores).all() and len(set(ids.tolist())) == len(scores) for scores, ids in offered)
    others = drafter.draft(300, 2, partial(pick, 2))
    assert others[0] != whole[0]
    assert not all(map(np.array_equal, offered[1], offered[-1])), "what was picked leads the next step"
    assert drafter.draft(300, 6) == whole, "drafts do not depend on what was drafted before"


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ([], "there is no token to decode"),
        ([99999], "token id 99999 is not in the vocabulary of 4096"),
        ([5, -1], "token id -1 is not in the vocabulary"),
        ([5] * 14, "14 tokens are too many for one step"),
        ([5] * 1025, r"0 \+ 1025 tokens exceed the context of 1024"),
    ],
)
def test_rows_that_cannot_be_are_refused(target: Target, tokens: list[int], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        target.verify(tokens)
    assert target.length == 0


def test_drafts_and_rollbacks_that_cannot_be_are_refused(target: Target, drafter: Drafter) -> None:
    target.prefill([5])
    for last, length, sentence in ((4096, 1, "4096"), (-1, 2, "not in the vocabulary"), (5, 13, "13")):
        with pytest.raises(RequestError, match=sentence):
            drafter.draft(last, length)
    with pytest.raises(RequestError, match="cannot roll back to 2"):
        target.rollback(2)
    assert target.length == 1


@pytest.mark.parametrize("lengths", [(20,), (290,), (128, 300), (250, 260, 700)])
def test_rows_come_back_with_the_bits_that_they_had(case: Case, opened: OpenedPair, target: Target, lengths: tuple[int, ...]) -> None:
    """Rows that were saved in parts, beyond the window too; what follows them, forwards and rollbacks, has the same bits.

    onnxruntime's own attention adds in an order that depends on where in its buffer a row lies.
    """
    same = case.assert_same if opened.row_kernels is None else np.testing.assert_array_equal
    assert isinstance(target, SavableTarget)
    tokens, parts, start = random_tokens(20, lengths[-1] + 40), [], 0
    for length in lengths:
        target.prefill(tokens[start:length])
        parts.append(target.state(start))
        start = length
    rest = tokens[start:]
    after = target.verify(rest[:13]).copy()
    target.rollback(start + 3)
    then = target.verify(rest[3:8]).copy()
    target.rollback(0)
    target.prefill(tokens[100:200])
    sliding = np.concatenate([part.sliding for part in parts if len(part.sliding)])
    rows = KvRows(np.concatenate([part.full for part in parts]), sliding[-max(len(parts[-1].sliding), target.sliding_rows) :])
    target.restore(tokens[:start], rows)
    assert target.tokens.tolist() == tokens[:start]
    same(target.verify(rest[:13]), after)
    target.rollback(start + 3)
    same(target.verify(rest[3:8]), then)
    target.rollback(start)
    assert target.rollback_floor <= start


def test_rows_that_cannot_be_restored_change_nothing(target: Target) -> None:
    assert isinstance(target, SavableTarget)
    tokens = random_tokens(20, 300)
    target.prefill(tokens)
    full, sliding = target.state()
    assert (full.shape[1], sliding.shape[1]) == target.row_bytes
    target.rollback(0)
    target.prefill(tokens[100:200])
    for rows in (
        KvRows(full[1:], sliding),
        KvRows(full[:, 1:], sliding),
        KvRows(full, sliding[:, 1:]),
        KvRows(full, sliding[-target.sliding_rows + 1 :]),
        KvRows(full, full),
    ):
        with pytest.raises(RequestError, match="do not fit this target"):
            target.restore(tokens, rows)
    with pytest.raises(RequestError, match="does not fit the context"):
        target.restore([5] * 1025, KvRows(full, sliding))
    assert target.tokens.tolist() == tokens[100:200]


def test_several_sequences_share_forwards_where_there_may_be_several(case: Case) -> None:
    maximum = case.backend.max_sequences
    with pytest.raises(
        RequestError, match=f"{maximum + 1} sessions at once are more than the {maximum} that {CARDS[case.kind].title} runs"
    ):
        check_options(case.kind, case.request(sequences=maximum + 1))
    if maximum == 1:
        return
    opened = case.backend.open(case.request(sequences=2, settings=load_settings(open_bundle(case.bundle), context=256)))
    texts, alone = [random_tokens(seed, 41) for seed in (21, 22)], []
    for target, text in zip(opened.batch.targets, texts, strict=True):
        target.prefill(text[:40])
        alone.append(target.verify(text[40:]).copy())
        target.rollback(40)
    batch = opened.batch.verify_all([(number, text[40:]) for number, text in enumerate(texts)])
    for ours, expected in zip(batch, alone, strict=True):
        case.assert_same(ours, expected)
    opened.batch.close()


def test_options_of_other_backends_are_refused_in_one_sentence(case: Case) -> None:
    candidates = load_settings(open_bundle(case.bundle), config=SpeculativeConfig(drafter=DrafterConfig(max_candidates=64)))
    asked = {"kv_type": "q8_0", "memory_limit": 1 << 40, "settings": candidates}
    options = case.request(**asked, device="gpu").special_options()
    assert set(options) == {"device", *("max_candidates" if name == "settings" else name for name in asked)}
    for name, value in asked.items():
        option = "max_candidates" if name == "settings" else name
        request = case.request(**{name: value})
        if option in case.backend.options:
            check_options(case.kind, request)
        else:
            with pytest.raises(RequestError, match=f"has no {option}, which is .*; leave it out, or use the llama backend"):
                check_options(case.kind, request)


def test_a_device_that_is_not_there_is_refused_with_those_that_are(case: Case) -> None:
    with pytest.raises(RequestError, match=r"there is no device 'abacus' that .* computes on here; there are cpu"):
        check_options(case.kind, case.request(device="abacus"))


def test_a_closed_pair_is_of_no_more_use(case: Case) -> None:
    opened = case.backend.open(case.request())
    target, drafter = opened.batch.targets[0], opened.drafters[0]
    target.prefill([5])
    opened.batch.close()
    opened.batch.close()
    uses = [lambda: target.verify([5]), lambda: target.prefill([5]), lambda: target.rollback(0), lambda: drafter.draft(5, 1)]
    if case.kind == "llama":  # these are llama.cpp's own memory
        uses += [lambda: opened.vocabulary.encode("x"), target.state, lambda: target.rollback_floor]
    for use in uses:
        with pytest.raises(RequestError, match="is closed; open the bundle again"):
            use()


def test_a_drafter_that_the_bundle_lacks_is_refused(case: Case) -> None:
    if case.kind != "onnx":
        pytest.skip("the bundle has both kinds")
    with pytest.raises(EdgeRuntimeError, match="head is split, not dense"):
        case.backend.open(case.request(drafter="dense"))


def test_it_describes_its_library_and_what_doctor_prints_of_it(case: Case) -> None:
    description = case.backend.describe()
    assert {"version", "row_kernels"} <= set(description)
    findings = case.backend.findings(description)
    assert description["version"] in findings[0][2]
    assert {state for _, state, _ in findings} <= {"ok", "missing", ""}
    assert case.backend.remedy(description["version"]) is None or case.kind == "llama"


def test_drafts_change_no_token(session: Session) -> None:
    for options in ({}, {"sampling": SamplingParams(temperature=0.8, top_k=40, seed=5), "acceptance": "coupled"}):
        plain, drafted = (session.generate(PROMPT, max_tokens=80, draft_length=length, **options) for length in (0, 4))
        assert plain.text() == drafted.text()
        assert plain.tokens == drafted.tokens
        assert drafted.stats.acceptance_rate > 0.1


def test_the_next_turn_computes_only_what_is_new(session: Session) -> None:
    """After drafts the cache holds the answer up to its stop token, which ended the turn before it had a row."""
    prompt, rest = session.vocabulary.encode(PROMPT), session.vocabulary.encode("\n\ndef sub(a, b):", add_bos=False)
    expected = session.generate(prompt, max_tokens=40, draft_length=0)
    first = session.generate(prompt, max_tokens=40, draft_length=4, stop=[expected.text()[-8:-2]])
    first.text()
    assert (first.finish_reason, first.tokens) == ("stop", expected.tokens[: len(first.tokens)])
    assert first.stats.accepted > 0
    known = [*prompt, *first.tokens]
    second = session.generate([*known, *rest], max_tokens=20, draft_length=4, reuse_prefix=True)
    second.text()
    assert second.stats.reused_tokens == len(known) - 1
    assert session.target.tokens[: len(second.prompt)].tolist() == second.prompt
    afresh = session.generate([*known, *rest], max_tokens=20, draft_length=0)
    assert afresh.text() == second.text()


def test_accepted_drafts_do_not_count_against_the_limit(session: Session) -> None:
    expected = session.generate(PROMPT, max_tokens=30, draft_length=0)
    expected.text()
    for max_tokens in (1, 2, 5, 9):
        drafted = session.generate(PROMPT, max_tokens=max_tokens, draft_length=8, prediction=expected.tokens)
        drafted.text()
        assert (drafted.finish_reason, drafted.tokens) == ("length", expected.tokens[:max_tokens])
        assert session.target.length == len(drafted.prompt) + max_tokens - 1


def test_the_context_can_be_filled_to_its_last_row(case: Case) -> None:
    with open_session(case.bundle, backend=case.kind, threads=1, context=40) as session:
        generation = session.generate(random_tokens(13, 30), max_tokens=100, draft_length=4)
        generation.text()
        assert session.target.length == 40
        assert len(generation.tokens) == 11


def test_a_fingerprint_stands_for_what_computes(case: Case) -> None:
    def fingerprint(context: int) -> str:
        with open_session(case.bundle, backend=case.kind, threads=1, drafter="none", context=context) as session:
            return session.fingerprint

    assert fingerprint(64) == fingerprint(64) != fingerprint(128)
