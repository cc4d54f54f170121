"""Rows of a prompt that nobody reads end behind the last K and V; what follows has the bits of a prompt that computes them all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

onnx = pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from changed_bundle import with_graphs
from edge_export.onnx import static as static_export
from edge_export.onnx.request import OnnxRequest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_runtime.backends.kernels import loader
from edge_runtime.backends.onnx.open import OrtOptions, open_onnx
from edge_runtime.backends.onnx.target import GraphTarget
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.interfaces import Drafter
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session
from kept import PAIR
from published_formats import to_mobile
from random_pairs import kept_bundle
from tiny_members import write_member

Bundles = Callable[..., Path]
# The largest chunk of a prefill is 256 rows, the window of the shipped pair 128.
PIECES = [[1], [2], [255], [256], [257], [300], [30, 1, 2, 255], [512, 88]]
PROMPTS = json.loads((PAIR / "prompts.code.json").read_text())
# Weights and K/V, and who multiplies: our own kernels multiply weights of integers only.
CASES = [
    ("f32", "f32", "stock kernels"),
    ("f32", "f16", "stock kernels"),
    ("f32", "int8", "stock kernels"),
    *((weights, "f32", kernels) for weights in ("int8", "int4") for kernels in ("row kernels", "stock kernels")),
]


class Opened(NamedTuple):
    target: GraphTarget
    drafter: Drafter
    notes: list[str]


def opened(folder: Path) -> Opened:
    notes: list[str] = []
    target, drafter, _ = open_onnx(open_bundle(folder), OrtOptions(context=768, threads=1), None, notes.append)
    assert drafter is not None
    return Opened(target, drafter, notes)


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the project's own kernels multiply."""
    if request.param == "stock kernels":
        monkeypatch.setenv(loader.VARIABLE, "none")
    elif not loader.usable_variants():
        pytest.skip("the row kernels were not built: pip install -e . builds them")
    return request.param == "row kernels"


def export_onnx(target: Path, drafter: Path, output: Path, onnx_request: OnnxRequest) -> None:
    export_pair(
        ExportRequest(target=str(target), drafter=str(drafter), output=output, context=1024, gguf=False, onnx=onnx_request, verify=False)
    )


def random_tokens(count: int, vocabulary: int = 4096) -> list[int]:
    return np.random.default_rng(0).integers(300, vocabulary, count).tolist()


def fill_whole(target: GraphTarget, tokens: Sequence[int]) -> None:
    """A prefill that computes every row."""
    for first in range(0, len(tokens), 256):
        ids = np.array(tokens[first : first + 256])
        target._forward(ids, None, len(ids))
    target.take_hidden(target.hidden_rows[0, len(ids) - 1 : len(ids)])


def following(pair: Opened, tokens: Sequence[int]) -> tuple[list[int], NDArray[np.float32], NDArray[np.float32]]:
    """Drafts before the first verify, its logits, and those of a row behind it."""
    drafts = pair.drafter.draft(tokens[0], 5)
    assert len(drafts) == 5
    return drafts, pair.target.verify(tokens[:5]).copy(), pair.target.verify(tokens[5:6]).copy()


def check_prompts(pair: Opened, all_pieces: Sequence[Sequence[int]], vocabulary: int = 4096) -> None:
    target, tokens = pair.target, random_tokens(700, vocabulary)
    assert target.skips_unread_rows
    assert pair.notes == []
    for pieces in all_pieces:
        result = []
        for whole in (False, True):
            target.rollback(0)
            for number, count in enumerate(pieces):
                piece = tokens[target.length : target.length + count]
                if whole:
                    fill_whole(target, piece)
                else:
                    target.prefill(piece, rows_read=int(number == len(pieces) - 1))
            result.append((target.hidden_row.copy(), *following(pair, tokens[target.length :])))
        (hidden, drafts, *logits), (whole_hidden, whole_drafts, *whole_logits) = result
        assert all(map(np.array_equal, logits, whole_logits)), pieces
        assert np.isfinite(logits[0]).all()
        if target.row_kernels:
            assert np.array_equal(hidden, whole_hidden), pieces
            assert drafts == whole_drafts, pieces
        else:
            # Stock products of quantized weights give a row other bits alone than in a batch, more so on some processors. The first draft
            # starts from this row, so drafts may differ at near ties; the text may not. A row that is another token's is further away.
            assert np.linalg.norm(hidden - whole_hidden) < 0.25 * np.linalg.norm(whole_hidden), pieces


@pytest.mark.parametrize(("weights", "kv", "kernels"), CASES, indirect=["kernels"])
def test_what_follows_a_prompt_has_the_same_bits(weights: str, kv: str, kernels: bool, onnx_pair: Bundles) -> None:
    pair = opened(onnx_pair(weights, kv=kv))
    with pair.target:
        assert pair.target.row_kernels == kernels
        check_prompts(pair, PIECES)


@pytest.mark.parametrize(("seed", "family"), [(0, "e2b"), (1, "e4b"), (2, "12b"), (3, "26b-a4b")])
@pytest.mark.parametrize(
    ("weights", "kernels"), [("f32", "stock kernels"), ("int4", "stock kernels"), ("int4", "row kernels")], indirect=["kernels"]
)
def test_pairs_of_every_shape_compute_the_same(seed: int, family: str, weights: Any, kernels: bool) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    drawn, bundle = kept_bundle(seed, gguf=False, onnx=OnnxRequest(target=weights, drafter=weights, block=32))
    assert drawn.family == family
    pair = opened(bundle)
    with pair.target:
        check_prompts(pair, [[1], [2], [255], [257], [30, 1, 2, 300]], vocabulary=512)
        if weights == "int4":
            layers = pair.target.assignments()["target-int4-b32.onnx"]["CPUExecutionProvider"]
            assert ("GroupQueryAttention" in layers) == (not kernels)


def test_weights_that_round_activations_compute_the_same(tmp_path: Path) -> None:
    """The mobile layout: its matrices are multiplied apart, each rounded by scales of its own."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    write_member("e2b", tmp_path / "target")
    to_mobile(tmp_path / "target", compressed=False)
    write_member("e2b-assistant", tmp_path / "drafter")
    export_onnx(tmp_path / "target", tmp_path / "drafter", tmp_path / "bundle", OnnxRequest())
    pair = opened(tmp_path / "bundle")
    with pair.target:
        check_prompts(pair, [[1], [2], [255], [257], [30, 1, 2, 300]], vocabulary=512)


def test_a_rollback_into_a_prompt_and_a_prefix_that_is_used_again_change_nothing(onnx_pair: Bundles) -> None:
    pair = opened(onnx_pair("int4"))
    target, tokens = pair.target, random_tokens(700)
    with target:
        for length, kept_rows in ((300, 299), (300, 250), (257, 256), (40, 1)):
            target.rollback(0)
            target.prefill(tokens[:length])
            target.rollback(kept_rows)
            assert pair.drafter.draft(tokens[kept_rows], 3) == [], "only the last row of a prompt has a hidden row"
            target.prefill(tokens[kept_rows:400])
            again = following(pair, tokens[400:])
            target.rollback(0)
            fill_whole(target, tokens[:kept_rows])
            fill_whole(target, tokens[kept_rows:400])
            first = following(pair, tokens[400:])
            assert again[0] == first[0]
            assert all(map(np.array_equal, again[1:], first[1:]))


def computing_all_rows(folder: Path, output: Path) -> Path:
    """The bundle with a target of an earlier version: its graph has no such input, and computes all rows."""

    def change(model: Any) -> None:
        (passed,) = (value for value in model.graph.input if value.name == "skipped_rows")
        model.graph.input.remove(passed)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(1, np.int64), "skipped_rows"))

    return with_graphs(folder, output, change, roles=["target"])


def tokens_of(session: Session) -> list[list[tuple[int, ...]]]:
    """The rounds of requests in turn, whose prompts share prefixes with each other, and are longer than one piece."""
    texts = [PROMPTS[0], PROMPTS[1], PROMPTS[0] + PROMPTS[1], " ".join(PROMPTS[:6])]
    requests = [session.generate(text[:1500], max_tokens=12, draft_length=3) for text in texts for _ in range(2)]
    return [[(*each.tokens, each.drafted) for each in request.rounds()] for request in requests]


def test_older_bundles_answer_the_same_and_say_once_what_exporting_again_brings(onnx_pair: Bundles, tmp_path: Path) -> None:
    folder = onnx_pair("int4")
    before = opened(computing_all_rows(folder, tmp_path / "older"))
    with before.target:
        assert not before.target.skips_unread_rows
        assert ["export the bundle again" in sentence for sentence in before.notes] == [True]
        whole = []
        for target, drafter, _ in (before, opened(folder)):
            target.prefill(random_tokens(400))
            assert target.hidden_row is not None
            whole.append((target.hidden_row.copy(), drafter.draft(300, 4), target.verify([300, 301]).copy()))
        assert np.array_equal(whole[0][2], whole[1][2])
        assert whole[0][1] == whole[1][1]
    rounds = []
    for bundle in (folder, tmp_path / "older"):
        with open_session(bundle, threads=1, context=768) as session:
            rounds.append(tokens_of(session))
    assert rounds[0] == rounds[1]


def test_a_prompt_in_graphs_of_fixed_shapes_gives_keys_and_values_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(name: str) -> Opened:
        export_onnx(PAIR / "target", PAIR / "drafter", tmp_path / name, OnnxRequest(target="f32", drafter="f32", device="static"))
        target, drafter, _ = open_onnx(open_bundle(tmp_path / name), OrtOptions(context=512, threads=1), None, notes.append)
        assert drafter is not None
        return Opened(target, drafter, notes)

    notes: list[str] = []
    now = export("now")
    assert notes == []
    graph = onnx.load(next((tmp_path / "now").glob("target-prefill*.onnx")), load_external_data=False).graph
    assert {value.name.split(".")[0] for value in graph.output} == {"new_key", "new_value"}
    write = static_export.write_target_graph
    monkeypatch.setattr(static_export, "write_target_graph", lambda *passed, prefill: write(*passed, prefill=False))
    before, tokens = export("before"), random_tokens(500)
    assert [now.target.skips_unread_rows, before.target.skips_unread_rows] == [True, False]
    assert ["export the bundle again" in sentence for sentence in notes] == [True]
    with now.target, before.target:
        for count in (1, 2, 3, 5, 63, 64, 65, 66, 128, 300):
            for target, _, _ in (now, before):
                target.rollback(0)
                target.prefill(tokens[:count])
            (drafts, *logits), (whole_drafts, *whole_logits) = (following(pair, tokens[count:]) for pair in (now, before))
            assert drafts == whole_drafts
            assert all(map(np.array_equal, logits, whole_logits))
