"""Tuning: the drafter unrolled as it drafts, texts, training that goes on where it stopped, and who decides which drafter is exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tuning runs transformers")
pytest.importorskip("transformers", reason="tuning runs transformers")

from edge_export import tuning
from edge_export.checkpoint.sources import reference_pair
from edge_export.errors import ExportError
from edge_export.parity.reference import ReferenceRows, load_reference
from edge_export.pipeline import export as pipeline
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_export.tuning import (
    Accepted,
    Recipe,
    Segment,
    acceptance,
    distillation_loss,
    draft_states,
    gain,
    greedy_choice,
    parts_of,
    prompts_from,
    target_rows,
    train,
    written_after,
)

TEXT = "".join(f"def step_{number}(value):\n    return value + {number}\n\n" for number in range(400))


@pytest.fixture(scope="module")
def models():
    target, drafter = (load_reference(folder) for folder in reference_pair())
    return target.requires_grad_(False), drafter


def a_text(length: int = 24) -> np.ndarray:
    return np.random.default_rng(1).integers(20, 4000, size=(2, length))


def test_the_unrolled_drafter_drafts_as_the_reference_does(models):
    """Row by row, with the assistant's own forward on the K/V rows before each position."""
    target, drafter = models
    tokens, segment = torch.from_numpy(a_text()), Segment(first=5, count=4, steps=3)
    with torch.inference_mode():
        result = [greedy_choice(drafter, state) for state in draft_states(drafter, target_rows(target, tokens, segment), segment)]
        for text in range(2):
            ids = tokens[text : text + 1]
            output = target(input_ids=ids, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
            window = drafter.config.get_text_config().sliding_window - 1
            rows = ReferenceRows(target.get_input_embeddings(), output.hidden_states[-1], dict(output.shared_kv_states), window)
            for place in range(segment.count):
                position = segment.first + place
                hidden = rows.hidden[:, position - 1 : position]
                for step in range(segment.steps):
                    answer = drafter(
                        inputs_embeds=torch.cat([rows.embed(ids[:, position + step : position + step + 1]), hidden], dim=-1),
                        position_ids=torch.tensor([[position]]),
                        shared_kv_states=rows.before(position),
                        use_cache=False,
                    )
                    hidden = answer.last_hidden_state
                    assert int(result[step][text, place]) == int(answer.logits[0, -1].argmax())


def test_parts_are_all_of_a_text_and_apart():
    observed, held = parts_of(TEXT)
    assert (len(observed), len(held)) == (16, 4)
    assert sorted("".join(observed + held)) == sorted(TEXT)
    assert not {line for part in held for line in part.splitlines() if "def" in line} & {
        line for part in observed for line in part.splitlines()
    }


def test_a_target_without_per_layer_inputs_may_share_its_key_value_rows():
    """Asked for a number of rows, transformers 5.24 cuts the inputs of layers that share K/V, also per-layer ones where there are none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(reference_pair()[0]).get_text_config()
    config.hidden_size_per_layer_input = 0
    assert config.num_kv_shared_layers > 0
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = a_text(12)
    texts = written_after(target, prompts, length=16, temperature=0.0, banned=[1], seed=1)
    assert (texts[:, :12] == prompts).all()
    with torch.no_grad():
        logits = target(input_ids=torch.from_numpy(texts), use_cache=False, output_hidden_states=True).logits
    logits[..., 1] = -torch.inf
    assert (texts[:, 12:] == logits[:, 11:-1].argmax(-1).numpy()).all()


def test_texts_have_no_end_tokens_and_are_greedy_at_zero(models):
    from transformers import PreTrainedTokenizerFast

    target, _ = models
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(reference_pair()[0] / "tokenizer.json"))
    prompts = prompts_from([TEXT], tokenizer, length=12, count=3, random=np.random.default_rng(2))
    texts = written_after(target, prompts, length=16, temperature=0.0, banned=[1], seed=1)
    assert (texts[:, :12] == prompts).all()
    with torch.no_grad():
        logits = target(input_ids=torch.from_numpy(texts)).logits
    logits[..., 1] = -torch.inf
    assert (logits.argmax(-1)[:, 11:-1].numpy() == texts[:, 12:]).all()
    banned = int(texts[0, 12])
    assert banned not in written_after(target, prompts, length=16, temperature=1.0, banned=[banned], seed=1)[:, 12:]
    with pytest.raises(ExportError, match="no part"):
        prompts_from(["short"], tokenizer, length=12, count=3, random=np.random.default_rng(2))


def test_acceptance_walks_rounds():
    """Drafts that are right at their first place only: every round of three drafts accepts one and moves on by two."""
    result = Accepted.of(np.full((2, 15), 1), length=3)
    assert (result.accepted.tolist(), result.drafted.tolist()) == ([8, 8], [24, 24])
    assert Accepted.of(np.array([[3, 0, 0, 0, 2, 0]]), length=3).accepted.tolist() == [5]
    low, high = gain(result, Accepted(drafted=result.drafted, accepted=result.accepted * 2))
    assert low == high == pytest.approx(1 / 3)


def test_acceptance_counts_drafts_that_the_text_confirms(models):
    """Text that the drafter itself would write is accepted whole, other text hardly."""
    target, drafter = models
    texts = written_after(target, a_text(12), length=40, temperature=0.0, banned=[], seed=1)
    written, drawn = (acceptance(target, drafter, each, prompt=12, length=3, batch=2) for each in (texts, a_text(52)))
    assert (drawn.accepted.sum() / drawn.drafted.sum()) < 0.1 < (written.accepted.sum() / written.drafted.sum())


def test_training_lowers_the_loss_and_goes_on_where_it_stopped(models, tmp_path, monkeypatch):
    target, _ = models
    seconds = iter(range(10**6))
    monkeypatch.setattr(tuning, "time", type("Clock", (), {"monotonic": lambda: float(next(seconds))}))
    texts, recipe = a_text(20), Recipe(minutes=6 / 60, batch=2, rate=3e-3)
    segment = Segment(first=1, count=16, steps=4)

    def trained(folder: Path, *shares: float):
        folder.mkdir()
        for share in shares:
            drafter = load_reference(reference_pair()[1])
            state = train(target, drafter, texts, recipe, folder, until=share)
        return drafter, state

    whole, state = trained(tmp_path / "whole", 1.0)
    parts, again = trained(tmp_path / "parts", 0.5, 1.0)
    assert state.steps >= 3
    assert again.steps >= 3
    rows = target_rows(target, torch.from_numpy(texts), segment)
    with torch.no_grad():
        before = float(distillation_loss(load_reference(reference_pair()[1]), rows, segment))
        assert float(distillation_loss(whole, rows, segment)) < before
        assert float(distillation_loss(parts, rows, segment)) < before
    (tmp_path / "parts" / tuning.STATE_NAME).write_bytes(b"damaged")
    with pytest.raises(ExportError, match="cannot be read"):
        train(target, load_reference(reference_pair()[1]), texts, recipe, tmp_path / "parts")


@pytest.fixture
def quick(monkeypatch, tmp_path):
    for name, value in {"TEXTS": 4, "HELD_OUT": 3, "BATCH": 2, "PROMPT": 12, "LENGTH": 24, "PARTS": 2}.items():
        monkeypatch.setattr(tuning, name, value)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    target, drafter = reference_pair()
    return ExportRequest(
        target=str(target),
        drafter=str(drafter),
        output=tmp_path / "bundle",
        drafter_quantization="bf16",
        target_quantization="bf16",
        verify=False,
        threads=1,
        tune_drafter=text,
        tune_minutes=0.001,
    )


@pytest.mark.parametrize("better", [True, False])
def test_the_better_drafter_is_exported(quick, monkeypatch, better):
    """Judging is scripted; the bundle's drafter is the trained one or the original, and says so."""
    monkeypatch.setattr(tuning, "gain", lambda *_: (0.01, 0.02) if better else (-0.01, 0.02))
    message: list[str] = []
    bundle = export_pair(quick, message.append)
    record = bundle.manifest.tuning
    assert (record is not None) == better
    assert any(("replaces the original" if better else "stays") in line for line in message)
    assert not pipeline.tuning_folder(quick).exists()
    assert bundle.manifest.sources["drafter"].origin == "drafter"
    listed = json.loads((bundle.folder / "manifest.json").read_text()).get("tuning")
    untuned = export_pair(replace(quick, tune_drafter=None, force=True))
    weights, shipped = (
        next(file for file in each.manifest.sources["drafter"].files if file.name == "model.safetensors") for each in (bundle, untuned)
    )
    assert (weights.sha256 != shipped.sha256) == better
    assert weights.bytes == pytest.approx(shipped.bytes, rel=0.01), "in the same type"
    if record is not None:
        assert (record.name, record.texts, record.draft_length) == ("text.txt", 2, 3)
        assert listed["sha256"] == record.sha256


def test_a_stopped_tuning_goes_on(quick):
    """The texts that the target wrote are there, so they are not written again."""
    folder, said = pipeline.tuning_folder(quick), []

    def when_judged(act):
        def note(line: str) -> None:
            said.append(line)
            if line.startswith("The drafter as it is"):
                act({path.name: path.stat().st_mtime_ns for path in folder.glob("*.npy")})

        return note

    def stop(texts):
        written.update(texts)
        raise KeyboardInterrupt

    written, again = {}, {}
    with pytest.raises(KeyboardInterrupt):
        export_pair(quick, when_judged(stop))
    assert str(folder) in said[-1]
    assert not quick.output.exists()
    export_pair(quick, when_judged(again.update))
    assert {"held-out.npy", "texts-0.npy"} <= written.keys()
    assert written.items() <= again.items()


def test_what_is_in_the_way_is_left_alone(quick):
    folder = pipeline.tuning_folder(quick)
    folder.mkdir()
    (folder / "mine").write_text("x")
    with pytest.raises(ExportError, match="in the way"):
        export_pair(quick)
    assert (folder / "mine").exists()
