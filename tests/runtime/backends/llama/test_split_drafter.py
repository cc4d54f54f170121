"""The split drafter on the reference pair: it drafts what the reference assistant's sparse head drafts, and rejects unfit files."""

from __future__ import annotations

import inspect
import json
import mmap
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.drafter import LlamaDrafter
from edge_runtime.backends.llama.split_drafter import LlamaSplitDrafter
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.errors import BackendError, RequestError

OPTIONS = LlamaOptions(context=1024, threads=1, batch=64)
STEPS, ROWS = 4, 5
# llama.cpp rounds weights, activations and K/V to float16, the reference does not.
NEAR_TIE = 0.08


def split_drafter(pair: Any, target: LlamaTarget) -> LlamaSplitDrafter:
    return LlamaSplitDrafter(pair.body, pair.head, target, pair.target, OPTIONS)


@pytest.fixture(scope="module")
def opened(reference_pair: Any) -> Iterator[tuple[LlamaTarget, LlamaSplitDrafter, LlamaDrafter]]:
    with LlamaTarget(reference_pair.target, OPTIONS) as target:
        yield target, split_drafter(reference_pair, target), LlamaDrafter(reference_pair.drafter, target, OPTIONS)


@pytest.fixture
def target(opened: Any) -> LlamaTarget:
    opened[0].rollback(0)
    return opened[0]


def text_tokens(target: LlamaTarget, count: int) -> list[int]:
    return target.vocabulary.encode(inspect.getsource(json) + inspect.getsource(random))[:count]


def random_tokens(_: LlamaTarget, count: int) -> list[int]:
    generator = random.Random(4)
    return [2, *(generator.randrange(300, 4096) for _ in range(count - 1))]


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
            hook = self.assistant.post_projection.register_forward_pre_hook(lambda _, given, into=captured: into.append(given[0]))
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


# The shipped pair's 8 centroids, and so few that the sparse head often chooses otherwise than a dense one would.
@pytest.mark.parametrize(("make", "top"), [(text_tokens, 8), (random_tokens, 8), (text_tokens, 1), (random_tokens, 1)])
def test_drafts_are_those_of_the_reference_s_sparse_head(
    reference_pair: Any, target: LlamaTarget, make: Any, top: int, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    head = with_top(reference_pair.head, top, tmp_path / "head.gguf")
    drafter = LlamaSplitDrafter(reference_pair.body, head, target, reference_pair.target, OPTIONS)
    tokens = make(target, 64 * ROWS + 1)
    same = steps = sparse_matters = 0
    with torch.no_grad(), drafter:
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
                assert sparse[choice] - sparse[token] < NEAR_TIE, f"{token} instead of {choice} at {end} is no near-tie"
    assert steps == 64 * STEPS
    assert same >= 0.98 * steps
    assert top > 1 or sparse_matters > 0.02 * steps, "a dense head would have passed too"


def test_drafts_do_not_depend_on_what_was_drafted_before(opened: Any, target: LlamaTarget) -> None:
    split, dense = opened[1:]
    tokens = text_tokens(target, 60)
    target.prefill(tokens[:50])
    first = split.draft(tokens[50], 6)
    split.draft(tokens[51], 3)
    dense.draft(tokens[52], 3)
    assert split.draft(tokens[50], 6) == first
    assert split.draft(tokens[50], 2) == first[:2]
    assert target.length == 50
    target.verify(tokens[50:58])
    target.rollback(53)
    after_rollback = split.draft(tokens[53], 3)
    target.rollback(0)
    target.prefill(tokens[:53])
    assert split.draft(tokens[53], 3) == after_rollback


def test_a_sampler_sees_the_candidates_and_its_choice_leads_the_next_step(opened: Any, target: LlamaTarget) -> None:
    split = opened[1]
    tokens = text_tokens(target, 51)
    target.prefill(tokens[:50])
    greedy = split.draft(tokens[50], 4)
    seen: list[Any] = []

    def likeliest(logits: Any, tokens: Any = None) -> int:
        assert len(set(tokens.tolist())) == len(tokens) == len(logits) == 8 * 64
        seen.append((tokens.copy(), logits.copy()))
        return int(tokens[logits.argmax()])

    def always(token: int) -> Any:
        seen.clear()
        return lambda logits, tokens=None: [token, seen.append((tokens.copy(), logits.copy()))][0]

    assert split.draft(tokens[50], 4, likeliest) == greedy
    assert split.draft(tokens[50], 2, always(300)) == [300, 300]
    after_one = seen[1]
    assert split.draft(tokens[50], 2, always(301)) == [301, 301]
    assert not np.array_equal(after_one[1], seen[1][1])


def test_it_refuses_what_every_drafter_refuses(opened: Any, target: LlamaTarget) -> None:
    assert opened[1].draft(5, 3) == [], "without a hidden row there is no draft"
    target.prefill([5])
    with pytest.raises(RequestError, match="token id 4096"):
        opened[1].draft(4096, 1)
    with pytest.raises(RequestError, match="a draft of 13 tokens"):
        opened[1].draft(5, 13)


def test_the_body_alone_is_no_dense_drafter(reference_pair: Any, target: LlamaTarget) -> None:
    with pytest.raises(BackendError, match="vocabulary size 192 against 4096"):
        LlamaDrafter(reference_pair.body, target, OPTIONS)


def test_files_that_do_not_fit_are_refused_and_nothing_stays_open(reference_pair: Any, target: LlamaTarget, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    shutil.copy(reference_pair.head, cut)
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size - 1)
    with pytest.raises(BackendError, match="is truncated"):
        LlamaSplitDrafter(reference_pair.body, cut, target, reference_pair.target, OPTIONS)
    with pytest.raises(BackendError, match="not a file"):
        LlamaSplitDrafter(tmp_path / "none.gguf", reference_pair.head, target, reference_pair.target, OPTIONS)
    with pytest.raises(BackendError, match=r"token_embd.weight has the shape \[192, 4096\]"):
        LlamaSplitDrafter(reference_pair.body, reference_pair.head, target, reference_pair.drafter, OPTIONS)
    assert all(drafter._pointer is None for drafter in target.shared.drafters[2:])


def test_closing_the_target_closes_all_its_drafters(reference_pair: Any) -> None:
    target = LlamaTarget(reference_pair.target, OPTIONS)
    split, dense = split_drafter(reference_pair, target), LlamaDrafter(reference_pair.drafter, target, OPTIONS)
    target.prefill([5])
    dense.close()
    assert len(split.draft(5, 2)) == 2
    target.close()
    split.close()
    with pytest.raises(RequestError, match="is closed"):
        split.draft(5, 1)


def test_a_draft_step_makes_no_copy_of_the_tables(opened: Any) -> None:
    maps = [weights.base for weights in opened[1]._head._context._maps]
    assert len(maps) == 6
    assert all(isinstance(mapped, np.memmap | mmap.mmap) for mapped in maps)


def test_a_closed_drafter_frees_its_head_once(reference_pair: Any, target: LlamaTarget) -> None:
    drafter = split_drafter(reference_pair, target)
    head = drafter._head
    drafter.close()
    drafter.close()
    assert drafter._head is None
    assert head._context._context is None
