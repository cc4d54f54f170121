"""A seed fixes the text: with any drafts and without, whatever ran before, in every run and every process, on both engines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

PROMPT = "class Stack:\n    def push(self, item):\n        "
SAMPLINGS = {
    "whole vocabulary": {"temperature": 1.0},
    "Gemma's filters": {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    "penalties and bias": {"temperature": 0.7, "min_p": 0.01, "repetition_penalty": 1.2, "logit_bias": {300: 2.0}},
}
TOKENS = 40


@pytest.fixture(scope="module", params=["onnx", "llama"])
def bundle(request: pytest.FixtureRequest, onnx_pair: Callable[..., Path]) -> Path:
    return onnx_pair("int4") if request.param == "onnx" else request.getfixturevalue("quantized_pair")


@pytest.fixture(scope="module")
def session(bundle: Path, probe_memory: Path) -> Iterator[Session]:
    with open_session(bundle, threads=1, context=1024) as opened:
        if not opened.row_equality().exact:
            pytest.skip("rows are not exact here: the row kernels were not built")
        yield opened


def tokens(session: Session, **options: object) -> list[int]:
    generation = session.generate(PROMPT, max_tokens=TOKENS, seed=11, **options)  # type: ignore[arg-type]
    generation.text()
    return generation.tokens


@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_do_not_change_the_text(session: Session, name: str) -> None:
    sampling = SAMPLINGS[name]
    plain = tokens(session, draft_length=0, **sampling)
    assert {tuple(tokens(session, draft_length=length, **sampling)) for length in (1, 2, 3, 5, 8, 12)} == {tuple(plain)}
    assert tokens(session, prediction="push(self, item)", **sampling) == plain
    for policy in ("profit", "rolling", "stepped", "fixed"):
        assert tokens(session.with_policy(policy), **sampling) == plain, policy
    assert tokens(session, draft_length=0, **(sampling | {"temperature": 1.3})) != plain


def test_no_drafter_changes_the_text(bundle: Path, session: Session) -> None:
    plain = tokens(session, draft_length=0, temperature=0.9)
    for drafter in ("split", "lookup", *(("dense",) if session.backend == "llama" else ())):
        with open_session(bundle, threads=1, context=1024, drafter=drafter) as other:
            generation = other.generate(PROMPT, max_tokens=TOKENS, seed=11, temperature=0.9, draft_length=4)
            generation.text()
            assert generation.stats.drafted > 0, drafter
            assert generation.tokens == plain, drafter


def test_what_lies_in_the_cache_changes_nothing(session: Session) -> None:
    """Drafts may depend on where earlier requests left their rows, and a prefix may be computed in other pieces."""
    plain = tokens(session, draft_length=3, temperature=1.0)
    for text in ("x = 1", PROMPT + "self.items", PROMPT[:20], "def f():\n" * 100):
        session.generate(text, max_tokens=3, draft_length=2, reuse_prefix=True).text()
        assert tokens(session, draft_length=3, temperature=1.0, reuse_prefix=True) == plain


def test_a_text_that_is_continued_goes_on_as_it_would_have(session: Session) -> None:
    plain = tokens(session, temperature=1.0)
    prompt = session.tokenize(PROMPT)
    rest = session.generate([*prompt, *plain[:15]], max_tokens=TOKENS - 15, temperature=1.0, seed=11)
    rest.text()
    assert rest.tokens == plain[15:]


def test_many_runs_have_one_text(session: Session) -> None:
    """If one run of twenty had another text, 100 runs would show it in 99 of 100 cases."""
    texts = {
        session.generate(PROMPT, max_tokens=12, seed=5, temperature=1.0, top_k=64, draft_length=None if run % 2 else run % 7).text()
        for run in range(100)
    }
    assert len(texts) == 1


def test_processes_have_one_text(bundle: Path, session: Session) -> None:
    """Each has its own addresses and hashes of strings."""
    plain = session.generate(PROMPT, max_tokens=20, seed=5, temperature=1.0).text()
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; from edge_runtime.session.open import open_session\n"
        f"with open_session({str(bundle)!r}, threads=1, context=1024) as session:\n"
        f"    print(ascii(session.generate({PROMPT!r}, max_tokens=20, seed=5, temperature=1.0).text()))"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == ascii(plain)
