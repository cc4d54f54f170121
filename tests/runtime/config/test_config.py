"""The configuration: what is refused and how, files that come back as they were, layers over layers, what a session makes of them."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH, BundleFile, ModelSource, RuntimeSettings
from edge_runtime.config.schema import (
    BLOCK,
    PRESET_NAMES,
    SECTIONS,
    CacheConfig,
    DrafterConfig,
    SpeculativeConfig,
    StreamingConfig,
    TuningConfig,
    VerifierConfig,
    bytes_of,
)
from edge_runtime.config.settings import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    PRESETS,
    config_text,
    expanded,
    load_settings,
    parse_config,
    preset_of,
    read_config,
    resolve_settings,
)
from edge_runtime.drafting.policies import POLICIES, Fixed, Rolling, RoundResult, Stepped
from edge_runtime.errors import BundleError, ConfigError, RequestError
from edge_runtime.session.session import Session
from scripted import MANIFEST, make_session, plain_greedy

maybe = st.none()
texts = maybe | st.text(min_size=1, max_size=40)
lengths = st.lists(st.integers(0, 12), min_size=3, max_size=3).map(sorted)


@st.composite
def tunings(draw: st.DrawFn) -> TuningConfig:
    shortest, first, longest = draw(lengths)
    return TuningConfig(
        preset=draw(maybe | st.sampled_from(PRESET_NAMES)),
        policy=draw(maybe | st.sampled_from(POLICIES)),
        min_horizon=draw(maybe | st.just(shortest)),
        draft_length=draw(maybe | st.just(first)),
        max_horizon=draw(maybe | st.just(max(longest, 1))),
        longest_draft=draw(maybe | st.integers(max(longest, 1), 12)),
        acceptance_threshold=draw(maybe | st.floats(0, 1)),
        rejection_penalty=draw(maybe | st.floats(0.01, 12)),
        monitoring_window=draw(maybe | st.integers(5, 10_000)),
    )


@st.composite
def configs(draw: st.DrawFn) -> SpeculativeConfig:
    return SpeculativeConfig(
        drafter=DrafterConfig(
            model=draw(texts),
            precision=draw(texts),
            sparse_output=draw(maybe | st.booleans()),
            max_candidates=draw(maybe | st.integers(1, 1 << 24)),
        ),
        verifier=VerifierConfig(model=draw(texts), precision=draw(texts)),
        cache=CacheConfig(
            max_context_length=draw(maybe | st.integers(1, 1 << 24)),
            kv_type=draw(maybe | st.sampled_from(["f16", "q8_0", "q4_0"])),
            memory_limit=draw(maybe | st.integers(1, 1 << 60) | st.sampled_from(["2GB", "1.5 GiB", "900"])),
            overflow=draw(maybe | st.sampled_from(["stop", "drop_oldest"])),
        ),
        tuning=draw(tunings()),
        streaming=StreamingConfig(chunk_size=draw(maybe | st.integers(1, 4096))),
    )


def keys_of(config: SpeculativeConfig) -> dict[tuple[str, str], object]:
    return {
        (name, each.name): value
        for name in SECTIONS
        for each in dataclasses.fields(getattr(config, name))
        if (value := getattr(getattr(config, name), each.name)) is not None
    }


@given(configs())
def test_a_written_file_reads_as_what_was_written(config):
    text = config_text(config)
    assert text.isascii()
    assert parse_config(text, "file") == config


@given(configs(), configs(), configs())
def test_what_is_said_above_holds_and_what_is_said_at_all_stays_said(upper, middle, lower):
    merged = upper.over(middle).over(lower)
    assert keys_of(upper).items() <= keys_of(merged).items()
    assert keys_of(merged).keys() == keys_of(upper).keys() | keys_of(middle).keys() | keys_of(lower).keys()
    tuning = merged.tuning
    if None not in (tuning.min_horizon, tuning.draft_length, tuning.max_horizon, tuning.longest_draft):
        assert tuning.min_horizon <= tuning.draft_length <= tuning.max_horizon <= tuning.longest_draft <= MAX_DRAFT_LENGTH


@given(configs(), configs())
def test_lower_values_move_only_where_they_must(upper, lower):
    moved = {key for key, value in keys_of(upper.over(lower)).items() if key not in keys_of(upper) and keys_of(lower)[key] != value}
    assert moved <= {("tuning", name) for name in ("min_horizon", "draft_length", "max_horizon", "longest_draft")}
    if not upper.tuning.lengths and upper.tuning.longest_draft is None:
        assert not moved


@given(configs())
def test_a_config_under_or_over_nothing_is_itself(config):
    assert config.over(SpeculativeConfig()) == SpeculativeConfig().over(config) == config


def test_a_range_moves_the_lower_layers_start():
    lower = SpeculativeConfig(tuning=TuningConfig(draft_length=3, min_horizon=1, max_horizon=8, longest_draft=8))

    def over(**tuning: int) -> tuple[int | None, ...]:
        merged = SpeculativeConfig(tuning=TuningConfig(**tuning)).over(lower).tuning
        return merged.min_horizon, merged.draft_length, merged.max_horizon, merged.longest_draft

    assert over(max_horizon=2) == (1, 2, 2, 8)
    assert over(min_horizon=5) == (5, 5, 8, 8)
    assert over(draft_length=10) == (1, 10, 10, 10)
    assert over(draft_length=0) == (0, 0, 8, 8)
    assert over(longest_draft=2) == (1, 2, 2, 2)


def test_keys_of_older_files_are_read_by_their_new_names():
    old = "speculative_decoding: {verifier: {parallel_batch_size: 9}, tuning: {initial_horizon: 3}, cache: {shared_kv: true}}"
    assert parse_config(old, "file") == SpeculativeConfig(tuning=TuningConfig(draft_length=3, longest_draft=8))
    both = "speculative_decoding: {tuning: {initial_horizon: 3, draft_length: 4}}"
    with pytest.raises(ConfigError, match=r"initial_horizon is the older name of .*draft_length, which has another value"):
        parse_config(both, "file")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("tuning: {max_horizn: 3}", "speculative_decoding.tuning.max_horizn is not known; the nearest known key is max_horizon"),
        ("tuningg: {}", "speculative_decoding.tuningg is not known; the nearest known key is tuning"),
        ("tuning: {chunk_size: 3}", "tuning.chunk_size is not known; it belongs under speculative_decoding.streaming"),
        ("tuning: {max_horizon: 13}", "max_horizon is 13; write an integer from 1 to 12"),
        ("tuning: {max_horizon: true}", "max_horizon is true; write an integer"),
        ("tuning: {acceptance_threshold: .nan}", "acceptance_threshold is nan; write a number from 0 to 1"),
        ("tuning: {policy: clever}", "policy is 'clever'; choose one of profit, fixed, rolling, stepped"),
        ("tuning: {draft_length: 5, max_horizon: 4}", "draft_length 5, max_horizon 4; min_horizon <= draft_length"),
        ("tuning: {initial_horizon: '5'}", "draft_length is '5'; write an integer"),
        ("{tuning: {max_horizon: 6}, verifier: {parallel_batch_size: 4}}", "max_horizon 6, longest_draft 3; .*<= longest_draft must hold"),
        ("drafter: {sparse_output: 'no'}", "sparse_output is 'no'; write true or false"),
        ("cache: {kv_type: lru}", "kv_type is 'lru'; choose one of f16"),
        ("cache: {memory_limit: 2 parsecs}", "memory_limit is '2 parsecs'; write a number of bytes"),
        ("cache: {memory_limit: 99999999999999 TB}", "memory_limit is"),
        ("drafter: {model: 4}", "model is 4; write a text"),
        ("drafter: {precision: ''}", "precision is ''; write a text"),
        ("tuning: 3", "speculative_decoding.tuning is 3, not keys with values"),
        ("[1]", r"speculative_decoding is \[1\], not keys with values"),
        ("tuning: {max_horizon: 3, max_horizon: 4}", "max_horizon stands in line 1 and again in line 1"),
        ("tuning: &a {max_horizon: 3}", "anchors and aliases"),
        ("tuning: {<<: {max_horizon: 3}}", "a key must be a plain word"),
        ("tuning: {2: 3}", "tuning.2 is not known"),
        ("tuning: !!python/object/apply:os.system ['echo']", "the tag .* is not allowed"),
        ("tuning: {max_horizon: " + "9" * 5000 + "}", "cannot be read"),
        ("tuning: {max_horizon: 2026-02-31}", "cannot be read"),
        ("tuning: " + "[" * 2000, "nested deeper"),
        ("tuning: {", "is not YAML"),
    ],
)
def test_refusals_name_file_place_value_and_what_to_do(body, words):
    with pytest.raises(ConfigError, match=f"^my.yaml.*{words}"):
        parse_config(f"{BLOCK}: {body if body[0] in '{[' else '{' + body + '}'}", "my.yaml")


def test_keys_at_the_top_are_told_where_they_belong():
    for text, words in (
        ("tuning: {}", "belongs under speculative_decoding"),
        ("speculative: {}", "nearest known key is speculative_decoding"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_config(text, "file")


@pytest.mark.parametrize("text", ["", "# nothing", f"{BLOCK}:", f"{BLOCK}: {{tuning: , cache: null}}", "---\n"])
def test_a_file_that_says_nothing_is_no_error(text):
    assert parse_config(text, "file") == SpeculativeConfig()


@given(st.text(max_size=200) | st.text(st.sampled_from("{}[]:,&*!|>-\n '\"a1?%@`<"), max_size=80))
def test_any_text_is_read_or_refused_in_one_sentence(text):
    message = ""
    try:
        parse_config(f"{BLOCK}: {text}", "file")
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 700


def test_an_alias_bomb_is_refused_before_it_grows():
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    with pytest.raises(ConfigError, match="anchors and aliases"):
        parse_config("\n".join(lines), "file")


def test_files_are_bounded_text_files(tmp_path: Path):
    big, odd, good = (tmp_path / name for name in ("big.yaml", "odd.yaml", "good.yaml"))
    big.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    odd.write_bytes(b"\xff\xfe")
    good.write_text("\ufeff" + config_text(preset_of("code")), encoding="utf-8")
    for path, words in ((big, "has more than"), (odd, "save it as UTF-8"), (tmp_path / "none", "not a file"), (tmp_path, "not a file")):
        with pytest.raises(ConfigError, match=words):
            read_config(path)
    assert read_config(good) == PRESETS["code"]


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2_000_000_000), ("1.5 GiB", 3 << 29), ("4096", 4096), ("3 kb", 3000), (17, 17), ("1TiB", 1 << 40)]
)
def test_sizes(text, size):
    CacheConfig(memory_limit=text)
    assert bytes_of(text) == size


@pytest.mark.parametrize(
    ("name", "start", "shortest", "longest"), [("code", 3, 2, 3), ("chat", 6, 5, 8), ("edge", 3, 2, 4), ("batch", 8, 8, 10)]
)
def test_presets(name, start, shortest, longest):
    tuning = expanded(SpeculativeConfig(tuning=TuningConfig(preset=name))).tuning
    assert (tuning.draft_length, tuning.min_horizon, tuning.max_horizon) == (start, shortest, longest)
    assert set(PRESETS) == set(PRESET_NAMES)


def test_what_stands_beside_a_preset_goes_over_it():
    tuning = expanded(parse_config(f"{BLOCK}: {{tuning: {{preset: chat, max_horizon: 4}}}}", "file")).tuning
    assert (tuning.draft_length, tuning.min_horizon, tuning.max_horizon) == (4, 4, 4)


def test_unknown_presets_are_refused():
    with pytest.raises(ConfigError, match="'fast' is unknown; choose one of code, chat, edge, batch"):
        preset_of("fast")


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
