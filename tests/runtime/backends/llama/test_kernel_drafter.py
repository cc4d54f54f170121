"""The kernels' drafter on llama.cpp's cells: the drafts of llama.cpp's own drafter, of one sequence and of several, and its fallback."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.kernels import ggml
from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.drafter import LlamaDrafter, LlamaKernelDrafter
from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import DraftRequest

if llama_library().row_kernels is None:
    pytest.skip("the row kernels do not run here", allow_module_level=True)


ROUNDS, STEPS, ROWS = 25, 4, 5
# llama.cpp rounds weights, activations and K/V to float16, the reference does not.
NEAR_TIE = 0.08


def options(**changes: Any) -> LlamaOptions:
    return LlamaOptions(**{"context": 1024, "threads": 1, "batch": 64, **changes})


def kernel_drafter(pair: Any, target: LlamaTarget, *, sparse: bool = False) -> LlamaKernelDrafter:
    return LlamaKernelDrafter(pair.drafter, pair.head if sparse else None, target, pair.target)


def text(target: LlamaTarget, count: int) -> list[int]:
    return target.vocabulary.encode(Path(__file__).read_text("utf-8"))[:count]


class Reference:
    """The assistant in float32 with its sparse head, unrolled at constant position."""

    def __init__(self, pair: Any, tokens: list[int]) -> None:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        load = {"dtype": torch.float32, "local_files_only": True}
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(pair.target_checkpoint, **load).eval()
        self.assistant = transformers.Gemma4AssistantForCausalLM.from_pretrained(pair.drafter_checkpoint, **load).eval()
        assert self.assistant.config.use_ordered_embeddings
        self.window = int(json.loads((pair.target_checkpoint / "config.json").read_text())["sliding_window"])
        output = self.model(torch.tensor([tokens]), output_hidden_states=True, return_shared_kv_states=True)
        self.hidden, self.shared = output.hidden_states[-1], output.shared_kv_states

    def rows_before(self, position: int) -> Any:
        # llama.cpp's window ends at the drafter's own position, which has no row: one row less than transformers takes.
        first = {"sliding_attention": max(0, position - self.window + 1)}
        return {kind: tuple(part[:, :, first.get(kind, 0) : position] for part in pair) for kind, pair in self.shared.items()}

    def unroll(self, position: int, last: int, draft: list[int]) -> Iterator[tuple[Any, Any]]:
        """Yields the sparse and the dense logits of every step, each after the tokens of `draft` before it."""
        hidden, torch = self.hidden[:, position - 1 : position], self.torch
        for token in draft:
            embeddings = torch.cat([self.model.get_input_embeddings()(torch.tensor([[last]])), hidden], dim=-1)
            captured: list[Any] = []
            hook = self.assistant.post_projection.register_forward_pre_hook(lambda _, provided, into=captured: into.append(provided[0]))
            output = self.assistant(
                inputs_embeds=embeddings, shared_kv_states=self.rows_before(position), position_ids=torch.tensor([[position]])
            )
            hook.remove()
            yield output.logits[0, -1].numpy(), self.assistant.lm_head(captured[0])[0, -1].numpy()
            hidden, last = output.last_hidden_state, token


def with_top(head: Path, top: int, to: Path) -> Path:
    """A copy of the head file that looks into `top` centroids."""
    key, uint32 = b"drafter_head.top_centroids", (4).to_bytes(4, "little")
    before, after = (key + uint32 + count.to_bytes(4, "little") for count in (8, top))
    data = head.read_bytes()
    assert data.count(before) == 1
    to.write_bytes(data.replace(before, after))
    return to


@pytest.fixture(params=["f16", "q8_0", "q4_0"])
def target(reference_pair: Any, request: pytest.FixtureRequest) -> Iterator[LlamaTarget]:
    with LlamaTarget(reference_pair.target, options(kv_type=request.param)) as target:
        yield target


@pytest.mark.parametrize("sparse", [False, True])
def test_drafts_are_llama_cpps(reference_pair: Any, target: LlamaTarget, sparse: bool) -> None:
    drafter, stock = kernel_drafter(reference_pair, target, sparse=sparse), LlamaDrafter(reference_pair.drafter, target, options())
    tokens = text(target, 220)
    target.prefill(tokens[:20])
    equal = 0
    for token in tokens[20:]:  # beyond the window of 128, of whose rows llama.cpp's drafter sees one fewer
        mine, its = drafter.draft(token, 3), stock.draft(token, 3)
        equal += next((n for n in range(3) if mine[n] != its[n]), 3)
        target.verify([token])
    assert equal > 0.9 * 3 * 200


# The shipped pair's 8 centroids, and so few that the sparse head often chooses otherwise than a dense one would.
@pytest.mark.parametrize(("random_text", "top"), [(False, 8), (True, 1)])
def test_drafts_are_those_of_the_reference_s_sparse_head(reference_pair: Any, random_text: bool, top: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    same = steps = sparse_matters = others = 0
    head = with_top(reference_pair.head, top, tmp_path / "head.gguf")
    with torch.no_grad(), LlamaTarget(reference_pair.target, options()) as target:
        drafter = LlamaKernelDrafter(reference_pair.drafter, head, target, reference_pair.target)
        generator = random.Random(4)
        count = ROUNDS * ROWS + 1
        tokens = [2, *(generator.randrange(300, 4096) for _ in range(count - 1))] if random_text else text(target, count)
        reference = Reference(reference_pair, tokens)
        reference.assistant.masked_embedding.centroid_intermediate_top_k = top
        for end in range(ROWS, len(tokens), ROWS):
            target.verify(tokens[end - ROWS : end])
            draft = drafter.draft(tokens[end], STEPS)
            for token, (sparse, dense) in zip(draft, reference.unroll(end, tokens[end], draft), strict=True):
                choice = int(sparse.argmax())
                steps += 1
                same += token == choice
                sparse_matters += choice != int(dense.argmax())
                if sparse[token] == sparse.min():  # of a centroid that the reference did not take: two tied
                    others += 1
                else:
                    assert sparse[choice] - sparse[token] < NEAR_TIE, f"{token} instead of {choice} at {end} is no near-tie"
    assert steps == ROUNDS * STEPS
    assert others <= 0.01 * steps
    assert same >= 0.98 * steps
    assert top > 1 or sparse_matters > 0.02 * steps, "a dense head would have passed too"


def test_files_that_do_not_fit_are_refused(reference_pair: Any, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(reference_pair.head.read_bytes()[:-1])
    with LlamaTarget(reference_pair.target, options()) as target:
        with pytest.raises(BackendError, match="is truncated"):
            LlamaKernelDrafter(reference_pair.drafter, cut, target, reference_pair.target)
        with pytest.raises(BackendError, match="not a file"):
            LlamaKernelDrafter(tmp_path / "none.gguf", reference_pair.head, target, reference_pair.target)
        with pytest.raises(BackendError, match=r"token_embd.weight has the shape \[192, 4096\]"):
            LlamaKernelDrafter(reference_pair.drafter, reference_pair.head, target, reference_pair.drafter)
        assert not target.shared.drafters


def test_a_file_without_a_key_is_left_to_llama_cpp(reference_pair: Any, tmp_path: Path) -> None:
    data = reference_pair.drafter.read_bytes()
    with LlamaTarget(reference_pair.target, options()) as target:
        for key in ("rope.freq_base", "rope.freq_base_swa", "embedding_length", "attention.layer_norm_rms_epsilon"):
            name = f"gemma4-assistant.{key}".encode()
            name = len(name).to_bytes(8, "little") + name
            assert data.count(name) == 1
            (tmp_path / "odd.gguf").write_bytes(data.replace(name, name[:-1] + b"X"))
            with pytest.raises(ValueError, match=f"it has no gemma4-assistant.{key}"):
                LlamaKernelDrafter(tmp_path / "odd.gguf", None, target, reference_pair.target)


def test_sequences_that_share_a_memory_draft_as_alone(reference_pair: Any) -> None:
    alone = []
    with LlamaTarget(reference_pair.target, options()) as target:
        drafter, tokens = kernel_drafter(reference_pair, target), text(target, 90)
        for first in (0, 30):
            target.rollback(0)
            target.prefill(tokens[first : first + 20])
            target.verify(tokens[first + 20 : first + 22])
            alone.append(drafter.draft(tokens[first + 22], 5))
    with LlamaTarget(reference_pair.target, options(sequences=2)) as target:
        drafter = kernel_drafter(reference_pair, target)
        item, other = target.shared.sequences
        item.prefill(tokens[:20])
        other.prefill(tokens[30:50])
        target.shared.verify_all([(item, tokens[20:22]), (other, tokens[50:52])])
        requests = [DraftRequest(sequence=n, last=tokens[30 * n + 22], draft_length=5) for n in (0, 1)]
        assert drafter.draft_all(requests) == alone
        other.verify(tokens[52:54])  # the hidden row of the first sequence is kept
        assert drafter.draft_all(requests[:1]) == alone[:1]


def test_without_known_cells_there_are_no_drafts_and_no_drafter_is_opened(reference_pair: Any) -> None:
    with LlamaTarget(reference_pair.target, options(use_extra_bufts=False)) as target:
        drafter, tokens = kernel_drafter(reference_pair, target), text(target, 30)
        target.prefill(tokens[:-1])
        assert len(drafter.draft(tokens[-1], 3)) == 3
        ggml.switch(enabled=False)  # llama.cpp's own attention
        try:
            target.verify(tokens[-1:])
            assert drafter.draft(300, 3) == []
            with pytest.raises(ValueError, match="do not run here"):
                kernel_drafter(reference_pair, target)
        finally:
            ggml.switch(enabled=True)
        target.verify([300])
        assert len(drafter.draft(301, 3)) == 3


def test_fewer_candidates_take_fewer_clusters(reference_pair: Any) -> None:
    with LlamaTarget(reference_pair.target, options(max_candidates=130)) as target:
        drafter = kernel_drafter(reference_pair, target, sparse=True)
        target.prefill(text(target, 20))
        counts: list[int] = []
        drafter.draft(300, 1, lambda scores, tokens=None: counts.append(len(scores)) or int(tokens[0]))  # type: ignore[func-returns-value]
        assert counts == [128]
    with (
        LlamaTarget(reference_pair.target, options(max_candidates=63)) as target,
        pytest.raises(RequestError, match="max_candidates is 63"),
    ):
        kernel_drafter(reference_pair, target, sparse=True)
