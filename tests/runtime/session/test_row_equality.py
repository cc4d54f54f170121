"""Whether drafts can change greedy text is compared on the machine, kept, and said; behind the sliding window they do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime import LoadOptions

pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_export.onnx.request import KvKind, OnnxRequest, OnnxWeights
from edge_runtime.errors import RequestError
from edge_runtime.session import row_equality
from edge_runtime.session.open import open_session, open_sessions
from edge_runtime.session.row_equality import RowEquality, compare_rows, known_row_equality
from kept import shipped_bundle

DIFFER = "drafts may change the text"


class Together:
    """Sequences of `context` rows each; rows of a forward with a number of rows in `other`, of all sequences, are moved by a thousandth."""

    def __init__(self, context: int, other: tuple[int, ...] = (), *, count: int = 1) -> None:
        self.targets = [Target(context, self, number) for number in range(count)]
        self.other, self.forwards, self.longest_text = other, 0, [0] * count

    def draft_all(self, requests: Sequence[object]) -> list[list[int]]:
        raise AssertionError(requests)

    def verify_all(self, batches: Sequence[tuple[int, Sequence[int]]]) -> list[NDArray[np.float32]]:
        self.forwards += 1
        moved = np.float32(1 / 1024) * (sum(len(tokens) for _, tokens in batches) in self.other)
        return [self.targets[number].appended(len(tokens)) + moved for number, tokens in batches]

    def close(self) -> None:
        raise AssertionError


class Target:
    """Rows that depend on their sequence and position alone."""

    def __init__(self, context: int, batch: Together, number: int) -> None:
        self.context, self.length, self._batch, self._number = context, 0, batch, number

    def rollback(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length

    def prefill(self, tokens: Sequence[int]) -> None:
        self.appended(len(tokens))
        self._batch.longest_text[self._number] = self.length

    def verify(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        (rows,) = self._batch.verify_all([(self._number, tokens)])
        return rows

    def appended(self, count: int) -> NDArray[np.float32]:
        begin, self.length = self.length, self.length + count
        assert self.length <= self.context
        return (100.0 * self._number + np.arange(begin, self.length, dtype=np.float32))[:, None] * np.ones(5, np.float32)


def compared(context: int, longest: int, other: tuple[int, ...] = (), *, count: int = 1) -> tuple[RowEquality, Together]:
    batch = Together(context, other, count=count)
    return compare_rows(batch, longest), batch  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("context", "longest"), [(16, 13), (64, 1), (4096, 13), (400, 5)])
def test_rows_of_every_width_are_compared_within_any_context(context: int, longest: int, count: int) -> None:
    equality, batch = compared(context, longest, count=count)
    assert (equality.exact, equality.different, equality.verdict) == (True, 0, "exact")
    assert [target.length for target in batch.targets] == [0] * count
    assert equality.compared >= count * min(longest, 4)


@pytest.mark.parametrize("width", [1, 4, 8, 13])
def test_rows_that_depend_on_their_number_are_found(width: int) -> None:
    equality, _ = compared(1000, 13, (width,))
    assert not equality.exact
    assert equality.largest == 1 / 1024
    assert "greedy text where two tokens are almost equally likely and sampled text anywhere" in equality.sentence()
    assert equality.to_json()["verdict"] == DIFFER


def test_the_longest_verify_is_compared_whatever_it_is() -> None:
    assert not compared(1000, 6, (6,))[0].exact


@pytest.mark.parametrize("rows", [3, 6, 39])
def test_rows_that_depend_on_the_requests_beside_are_found(rows: int) -> None:
    """Three sequences with a row each, with two each, and with all rows of the longest verifies."""
    assert not compared(1000, 13, (rows,), count=3)[0].exact


def test_only_the_first_of_several_sequences_has_a_long_text() -> None:
    _, batch = compared(4096, 13, count=4)
    assert batch.longest_text == [300, 40, 40, 40]


def test_the_result_is_kept_for_the_session_s_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    several = Together(1000, count=2)
    known_row_equality("files, code, processor", several, 13, print)  # type: ignore[arg-type]

    def forwards(fingerprint: str, batch: Together, longest: int) -> int:
        before = batch.forwards
        known_row_equality(fingerprint, batch, longest, print)  # type: ignore[arg-type]
        return batch.forwards - before

    assert forwards("files, code, processor", several, 13) == 0
    # Another file, kernel or K/V type; longer verifies; another number of sequences; and nothing known about what an answer depends on.
    assert forwards("others", several, 13) > 0
    assert forwards("files, code, processor", several, 16) > 0
    assert forwards("files, code, processor", Together(1000), 13) > 0
    assert forwards("", several, 13) == forwards("", several, 13) > 0


def test_a_damaged_result_is_refused() -> None:
    for values in ((3, 4, 0.0), (3, -1, 0.0), (3, 1, float("nan"))):
        with pytest.raises(ValueError, match="rows differ"):
            RowEquality(compared=values[0], different=values[1], largest=values[2])


@pytest.mark.parametrize(("kind", "weights"), [("f32", "int4"), ("f32", "int8"), ("f16", "int4"), ("int8", "int4")])
def test_rows_that_stock_attention_reads_are_not_exact_whatever_few_rows_say(kind: KvKind, weights: OnnxWeights) -> None:
    """Of 1,000 rows of the shipped pair on float16 K/V 42 differ, in stretches, so that a few show none."""
    bundle = shipped_bundle(gguf=False, onnx=OnnxRequest(kv=kind, target=weights))
    with open_sessions(bundle, 1, threads=1) as sessions:
        for equality in (sessions.row_equality(), sessions.sessions[0].row_equality()):
            assert equality.stock_attention == (kind != "f32")
            assert equality.to_json()["verdict"] == ("exact" if kind == "f32" and sessions.sessions[0].row_kernels else DIFFER)


def test_a_session_says_it_and_goes_on(exported_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session(exported_pair, threads=1) as session:
        before = session.generate("abc", max_tokens=8).text()
        assert session.row_equality().compared > 0
        monkeypatch.setattr(row_equality, "compare_rows", lambda *_: pytest.fail("it is known"))
        session.row_equality()
        assert session.generate("abc", max_tokens=8).text() == before


def test_sessions_release_their_requests_when_they_compare(exported_pair: Path) -> None:
    with open_sessions(exported_pair, 2, threads=1) as sessions:
        generation = sessions.sessions[1].generate("abc", max_tokens=8)
        next(generation.rounds())
        assert sessions.row_equality().compared > sessions.sessions[0].row_equality().compared
        with pytest.raises(RequestError, match="another request began"):
            list(generation.rounds())
        assert sessions.sessions[1].generate("abc", max_tokens=8).text()


WINDOW = 128


@pytest.mark.parametrize("backend", ["llama", "onnx"])
@pytest.mark.parametrize("prompt", ["class Stack:\n", "class Stack:\n" + "    x = 1\n" * 60], ids=["grows past it", "begins past it"])
def test_drafts_behind_the_window_leave_the_text(
    backend: str, prompt: str, request: pytest.FixtureRequest, onnx_pair: Callable[[str], Path]
) -> None:
    bundle = request.getfixturevalue("quantized_pair") if backend == "llama" else onnx_pair("int4")
    with open_session(bundle, LoadOptions(backend=backend, threads=1, context=1024, drafter="split")) as session:
        if session.row_kernels is None:
            pytest.skip("rows are exact on the project's own kernels alone, which have no variant for this processor")
        plain = session.generate(prompt, max_tokens=2 * WINDOW, draft_length=0)
        plain.text()
        drafted = session.generate(prompt, max_tokens=2 * WINDOW, draft_length=7)
        accepted = [round_.accepted for round_ in drafted.rounds()]
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens) == 2 * WINDOW
    assert sum(accepted[-len(accepted) // 4 :]) > 0, "the last quarter of the text stands behind the window"
