"""Layers of configuration against a bundle: precedence, what a session makes of them, what contradicts the files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import BundleFile, ModelSource, RuntimeSettings
from edge_runtime.config.schema import DrafterConfig, SpeculativeConfig, StreamingConfig, TuningConfig, VerifierConfig
from edge_runtime.config.settings import CONFIG_NAME, config_text, load_settings, resolve_settings
from edge_runtime.drafting.policies import Fixed, Rolling, RoundResult, Stepped
from edge_runtime.errors import BundleError, ConfigError, RequestError
from edge_runtime.session.session import Session
from scripted import MANIFEST, make_session, plain_greedy


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    files = tuple(
        BundleFile(path=f"{role}.gguf", role=role, format="gguf", bytes=0, sha256="", quantization=quantization)
        for role, quantization in (("target", "q8_0"), ("drafter", "q4_0"))
    )
    sources = {role: ModelSource(origin=f"google/{role}-model", model_type="gemma4", files=()) for role in ("target", "drafter")}
    return Bundle(tmp_path, replace(MANIFEST, files=files, sources=sources))


def tuned(**tuning: Any) -> SpeculativeConfig:
    return SpeculativeConfig(tuning=TuningConfig(**tuning))


def write(bundle: Bundle, config: SpeculativeConfig) -> None:
    (bundle.folder / CONFIG_NAME).write_text(config_text(config))


@pytest.mark.parametrize("harm", ["link", "pipe", "dangling"])
def test_the_bundles_file_is_no_way_to_another_file(bundle, tmp_path, harm):
    path = bundle.folder / CONFIG_NAME
    (tmp_path / "secret").write_text("root:secret")
    if harm == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / ("secret" if harm == "link" else "nothing"))
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read") as caught:
        load_settings(bundle)
    assert "secret" not in str(caught.value)


def test_without_any_file_the_manifest_recommends(bundle):
    settings = load_settings(bundle)
    assert (settings.policy, settings.draft_length, settings.context, settings.longest_draft, settings.chunk_size) == (
        "profit",
        2,
        64,
        12,
        1,
    )
    assert isinstance(settings.new_policy(), Fixed)
    assert settings.drafter is None


def test_the_order_is_call_config_preset_bundle_defaults(bundle):
    write(bundle, tuned(policy="stepped", draft_length=1, monitoring_window=77, rejection_penalty=0.5))
    assert load_settings(bundle).policy == "stepped"
    assert load_settings(bundle, preset="chat").policy == "rolling"
    settings = load_settings(bundle, config=tuned(draft_length=7), preset="chat", context=40)
    assert (settings.draft_length, settings.shortest, settings.longest) == (7, 5, 8)
    assert (settings.window, settings.penalty, settings.context) == (77, 0.5, 40)
    assert load_settings(bundle, config=tuned(preset="code"), preset="chat").longest == 3, "a file's own preset stands right under it"


def test_a_file_is_as_good_as_an_object(bundle, tmp_path):
    (tmp_path / "mine.yaml").write_text(config_text(tuned(draft_length=5)))
    assert load_settings(bundle, config=tmp_path / "mine.yaml") == load_settings(bundle, config=tuned(draft_length=5))


def test_policies_are_made_of_the_tuning(bundle):
    policy = load_settings(bundle, config=tuned(policy="rolling", draft_length=4, min_horizon=3, rejection_penalty=2.0)).new_policy()
    assert isinstance(policy, Rolling)
    assert policy.plan().draft_length == 4
    policy.observe(RoundResult(4, 0))
    assert policy.plan().draft_length == 3
    policy = load_settings(bundle, config=tuned(policy="rolling", acceptance_threshold=0.2, monitoring_window=5)).new_policy()
    for drafted, accepted, length in ((2, 0, 1), (1, 1, 2), (2, 1, 3)):  # 5 tokens are one round
        policy.observe(RoundResult(drafted, accepted))
        assert policy.plan().draft_length == length
    stepped = load_settings(bundle, config=tuned(policy="stepped", min_horizon=3, max_horizon=5)).new_policy()
    assert isinstance(stepped, Stepped)
    assert stepped.plan().draft_length == 3
    stepped.observe(RoundResult(10, 10))
    assert stepped.plan().draft_length == 5


def test_plain_decoding_by_configuration(bundle):
    assert load_settings(bundle, config=tuned(draft_length=0)).new_policy().plan().draft_length == 0
    assert load_settings(bundle, config=tuned(policy="rolling", draft_length=0)).new_policy().plan().draft_length == 1


def test_rows_bound_every_draft(bundle):
    settings = load_settings(bundle, config=SpeculativeConfig(tuning=TuningConfig(longest_draft=2)), preset="batch")
    assert (settings.longest_draft, settings.longest, settings.draft_length) == (2, 2, 2)


@pytest.mark.parametrize(("sparse", "kind"), [(True, "split"), (False, "dense"), (None, None)])
def test_sparse_output_chooses_the_drafter(bundle, sparse, kind):
    assert load_settings(bundle, config=SpeculativeConfig(drafter=DrafterConfig(sparse_output=sparse))).drafter == kind


def test_the_files_are_held_against_the_configuration(bundle):
    fitting = VerifierConfig(model="/elsewhere/target-model", precision="Q8_0")
    load_settings(bundle, config=SpeculativeConfig(verifier=fitting))
    for config, words in (
        (SpeculativeConfig(verifier=VerifierConfig(precision="q4_0")), "precision is 'q4_0', but the target in .* is q8_0"),
        (SpeculativeConfig(drafter=DrafterConfig(precision="int4")), "precision is 'int4', but the drafter in .* is q4_0"),
        (SpeculativeConfig(drafter=DrafterConfig(model="google/other")), "made from 'google/drafter-model'"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_settings(bundle, config=config)


def test_the_edge_preset_says_when_the_target_is_not_of_4_bits(bundle):
    received: list[str] = []
    load_settings(bundle, preset="edge", notify=received.append)
    load_settings(bundle, preset="chat", notify=received.append)
    assert len(received) == 1
    assert "this one is q8_0" in received[0]


def test_a_damaged_config_in_the_bundle_is_refused(bundle):
    (bundle.folder / CONFIG_NAME).write_text("speculative_decoding: {tunning: {}}")
    with pytest.raises(ConfigError, match=f"{CONFIG_NAME}: speculative_decoding.tunning is not known; the nearest known key is tuning"):
        load_settings(bundle)


def test_a_manifest_that_recommends_nonsense_is_the_bundles_fault(bundle):
    odd = Bundle(bundle.folder, replace(bundle.manifest, runtime=RuntimeSettings(draft_length=99)))
    with pytest.raises(BundleError, match="draft_length is 99"):
        resolve_settings([], odd)


def opened(bundle: Bundle, config: SpeculativeConfig) -> Session:
    return make_session(bundle=bundle, settings=load_settings(bundle, config=config))


def test_a_session_runs_as_configured(bundle):
    config = SpeculativeConfig(
        tuning=TuningConfig(policy="rolling", draft_length=3, max_horizon=4), streaming=StreamingConfig(chunk_size=20)
    )
    session = opened(bundle, config)
    generation = session.generate([1, 2], max_tokens=40)
    assert len(list(generation)) == 2
    assert session.drafter.lengths[:3] == [3, 4, 4]
    assert generation.tokens == plain_greedy([1, 2], 40)


def test_a_draft_that_needs_more_rows_than_there_are_is_refused(bundle):
    session = opened(bundle, SpeculativeConfig(tuning=TuningConfig(longest_draft=3)))
    session.generate([1], draft_length=3).text()
    with pytest.raises(RequestError, match="draft length 4 is above longest_draft 3; draft at most 3"):
        session.generate([1], draft_length=4)
