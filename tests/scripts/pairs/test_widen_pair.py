"""A widened pair computes what the narrow one does: logits, unused tokens far below, the sparse head's choices."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs edge-mtp[train]")
pytest.importorskip("transformers", reason="needs edge-mtp[train]")
from click.testing import CliRunner
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

import widen_pair
from edge_export.tuning import greedy_choice
from refpair.drafter import draft_states, target_rows

PAIR = Path(__file__).parents[3] / "exporter" / "edge_export" / "reference_pair"
OLD, NEW = 4096, 8192
FAR_BELOW = -10.0


def load(folder: Path):
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    target = Gemma4ForCausalLM.from_pretrained(folder / "target", **options).eval()
    return target, Gemma4AssistantForCausalLM.from_pretrained(folder / "drafter", **options).eval()


def test_a_wider_pair_computes_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(widen_pair, "SAMPLES", 8)  # a small vocabulary is kept away from hidden rows by fewer texts
    sizes = ["--intermediate", "1024", "--vocabulary", str(NEW)]
    result = CliRunner().invoke(widen_pair.main, [str(PAIR), "-o", str(tmp_path / "wide"), *sizes])
    assert result.exit_code == 0, result.output
    torch.manual_seed(1)
    tokens = torch.randint(20, OLD, (1, 160))
    tokens[:, 0] = 2
    with torch.no_grad():
        narrow, wide = ((*pair, target_rows(pair[0], tokens)) for pair in (load(PAIR), load(tmp_path / "wide")))
        assert torch.allclose(narrow[2].logits, wide[2].logits[..., :OLD], atol=2e-3)
        assert wide[2].logits[..., OLD:].max() < FAR_BELOW
        for small, large in zip(
            draft_states(narrow[1], narrow[0], tokens, narrow[2], 3), draft_states(wide[1], wide[0], tokens, wide[2], 3), strict=True
        ):
            agreement = (greedy_choice(narrow[1], small)[:, 1:] == greedy_choice(wide[1], large)[:, 1:]).float().mean()
            assert agreement > 0.995


@pytest.mark.parametrize("options", [("--intermediate", "1000"), ("--vocabulary", "5000"), ("--vocabulary", "2048")])
def test_sizes_that_do_not_fit_are_refused(tmp_path, options):
    result = CliRunner().invoke(widen_pair.main, [str(PAIR), "-o", str(tmp_path / "wide"), *options])
    assert result.exit_code == 1
    assert "must be multiples of" in result.output
    assert not (tmp_path / "wide").exists()
