"""The plan: arithmetic on made-up devices, beside speeds that others published, what it refuses, and how measurements stand beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from edge_devices.errors import DeviceError
from edge_devices.machine.detection import profiles
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import Architecture, BundleFile
from edge_runtime.cli import options as cli_options
from edge_runtime.cli import run as cli
from edge_runtime.cli.plan import Measured, plan_lines, short_lines
from edge_runtime.drafting.energy_objective import PhasePower
from edge_runtime.errors import RequestError
from edge_runtime.planning import speed_profile as speed_profile_module
from edge_runtime.planning.memory import MemoryPlan
from edge_runtime.planning.speed import (
    PairFacts,
    Range,
    SpeedPlan,
    SpeedProfile,
    manifest_plan,
    of_backend,
    pair_facts,
    speed_plan,
)
from edge_runtime.planning.speed_profile import product_operations, speed_profile
from scripted import MANIFEST

GB, G = 1e9, 1e9
FACTS = PairFacts(
    target_bytes=1.2 * GB,
    step_bytes=12e6,
    parameters=1.9e9,
    head_parameters=0.4e9,
    prompt_parameters=0.5e9,
    drafter_parameters=12e6,
    layers=35,
    drafter_layers=4,
    kv_bytes=40e6,
)


def device(gb: float, operations: float) -> SpeedProfile:
    return SpeedProfile(
        name="made up",
        bandwidth=Range.between(0.8 * gb * GB, 1.25 * gb * GB),
        bandwidth_from="test",
        operations=Range.between(0.8 * operations * G, 1.25 * operations * G),
        operations_from="test",
    )


def plan(gb: float = 20, operations: float = 4000, facts: PairFacts = FACTS, power: PhasePower | None = None) -> SpeedPlan:
    return speed_plan(facts, device(gb, operations), MemoryPlan(process=1, weights=2, repacked=3, cache=4, buffers=5), 8, power)


def test_a_device_that_computes_slowly_is_bound_by_that() -> None:
    actual = plan(gb=1000, operations=100)
    assert actual.plain.middle == pytest.approx(100 * G / (2 * FACTS.parameters), rel=0.1)
    assert actual.draft_length == (0, 0, 0)
    assert plan(operations=4000).draft_length[1] > 0


def test_reading_and_computing_add_up_and_at_best_overlap_for_one_row() -> None:
    actual = plan(gb=12, operations=40)  # 0.1 s to read, 0.095 s for a row
    assert actual.verify_seconds[0] == pytest.approx(0.1 + 0.095, rel=0.03)
    assert actual.verify_seconds[8] - actual.verify_seconds[0] == pytest.approx(8 * 0.095)
    assert 1 / actual.plain.high == pytest.approx(max(0.1 / 1.25, 0.095 / 1.25), rel=0.03)


def test_few_bytes_per_weight_make_a_row_dear_beside_reading() -> None:
    def shape(target_bytes: float) -> float:
        actual = speed_plan(
            replace(FACTS, target_bytes=target_bytes),
            speed_profile("raspberry-pi-5", None),
            MemoryPlan(process=1, weights=2, repacked=3, cache=4, buffers=5),
            8,
            None,
        )
        return actual.verify_seconds[3] / actual.verify_seconds[0]

    assert shape(1.1 * GB) > shape(3.8 * GB) > 1


def test_a_prefill_computes_what_keys_and_values_need_and_at_worst_all_but_the_head() -> None:
    every_layer = replace(FACTS, prompt_parameters=FACTS.parameters - FACTS.head_parameters)
    with_head = replace(every_layer, head_parameters=0.0)
    assert plan().prefill.middle / plan(facts=every_layer).prefill.middle == pytest.approx(1.5 / 0.5, rel=0.01)
    assert plan().prefill.low == plan(facts=every_layer).prefill.low
    assert plan().prefill.low / plan(facts=with_head).prefill.low == pytest.approx(1.9 / 1.5, rel=0.01)
    assert "of which K and V need 26%, at worst all but the head" in plan().derived["prefill"]


@given(
    gb=st.floats(1, 500),
    operations=st.floats(1, 1e5),
    size=st.floats(1e6, 3e10),
    parameters=st.floats(1e6, 4e10),
    step=st.floats(1e5, 1e9),
    layers=st.integers(1, 80),
)
def test_ranges_are_in_order_and_drafts_never_make_the_plan_slower(
    gb: float, operations: float, size: float, parameters: float, step: float, layers: int
) -> None:
    facts = replace(
        FACTS,
        target_bytes=size,
        parameters=parameters,
        step_bytes=step,
        layers=layers,
        head_parameters=parameters / 5,
        prompt_parameters=parameters / 3,
    )
    actual = plan(gb, operations, facts, PhasePower(draft=2.0, verify=5.0))
    for value in (actual.plain, actual.drafted, actual.prefill, actual.step_seconds, actual.joules_per_token):
        assert value is not None
        assert 0 < value.low <= value.middle <= value.high
    assert actual.drafted.middle >= actual.plain.middle
    low, best, high = actual.draft_length
    assert 0 <= low <= best <= high <= 8
    assert list(actual.verify_seconds) == sorted(actual.verify_seconds)


@given(gb=st.floats(1, 200), factor=st.floats(1, 10))
def test_more_bandwidth_is_never_slower(gb: float, factor: float) -> None:
    assert plan(gb * factor).plain.middle >= plan(gb).plain.middle * 0.999


def test_joules_are_seconds_times_watts_and_unknown_without_watts() -> None:
    assert plan().joules_per_token is None
    assert "--phase-power" in plan().derived["joules"]
    once, twice = (plan(power=PhasePower(draft=w, verify=w)).joules_per_token for w in (4.0, 8.0))
    assert once is not None
    assert twice is not None
    assert twice.middle == pytest.approx(2 * once.middle)
    assert once.middle == pytest.approx(4.0 / plan().drafted.middle, rel=1e-6)


def test_the_first_token_comes_after_the_prompts_rows_and_one_forward() -> None:
    actual = plan(operations=400)
    assert actual.prompt_tokens == 2000
    for first, rate in ((actual.first_token_seconds.high, actual.prefill.low), (actual.first_token_seconds.low, actual.prefill.high)):
        assert first == pytest.approx(1999 / rate, rel=0.2)
        assert first > 1999 / rate
    skipping, all_layers = (
        plan(operations=400, facts=replace(FACTS, prompt_parameters=n)).first_token_seconds.middle for n in (0.5e9, 1.5e9)
    )
    assert all_layers / skipping == pytest.approx(3, rel=0.1)
    assert actual.joules_per_prompt_token is None
    joules = plan(operations=400, power=PhasePower(draft=1, verify=4)).joules_per_prompt_token
    assert joules is not None
    assert joules.middle == pytest.approx(4 / actual.prefill.middle)


def test_few_rows_are_enough_for_a_decision() -> None:
    made = plan()
    lines, full = short_lines(made), plan_lines(made)
    names = [line[2:15].strip() for line in lines[1:-1]]
    assert names == ["worth it", "memory", "anonymous", "of files", "first token", "plain", "drafted", "draft length"]
    assert set(lines[:-1]) <= set(full)
    assert "--how" in lines[-1]


def test_a_wait_of_minutes_is_said_in_minutes() -> None:
    slow, quick = plan(operations=4), plan(operations=4000)
    line, short = (next(line for line in plan_lines(p) if line.lstrip().startswith("first token")) for p in (slow, quick))
    assert line.split()[2] == f"{slow.first_token_seconds.middle / 60:.3g}"
    assert "min after a prompt of 2000 tokens" in line
    assert "] s after a prompt" in short


def test_tables_that_rows_are_looked_up_in_are_not_read_and_of_experts_only_those_in_use() -> None:
    own = Architecture(
        family="E2B",
        hidden_size=1536,
        layers=35,
        vocab_size=262144,
        context_length=4096,
        parameters=4_600_000_000,
        drafter_hidden_size=256,
        drafter_layers=4,
        drafter_parameters=78_000_000,
        ordered_embeddings=True,
        feed_forward_size=12288,
        per_layer_size=256,
    )
    file = BundleFile(path="t", role="target", format="gguf", bytes=3_000_000_000, sha256="", quantization="q4_0")
    manifest = replace(MANIFEST, architecture=own, files=(file, replace(file, role="drafter", bytes=90_000_000)))
    facts = pair_facts(manifest, "dense", 1024, "f16")
    assert facts.parameters == 4_600_000_000 - 262144 * 35 * 256
    assert facts.target_bytes == pytest.approx(3e9 * facts.parameters / 4.6e9)
    assert facts.prompt_parameters == facts.parameters - facts.head_parameters, "older bundles do not have it"
    newer = replace(manifest, architecture=replace(own, prompt_parameters=528_000_000))
    assert pair_facts(newer, "dense", 1024, "f16").prompt_parameters == 528_000_000
    experts = replace(
        own, family="26B-A4B", hidden_size=2816, layers=30, parameters=25_800_000_000, feed_forward_size=7744, per_layer_size=0
    )
    active = pair_facts(replace(manifest, architecture=experts), "dense", 1024, "f16").parameters
    assert 3.4e9 < active < 5e9


def test_experts_need_less_memory_than_all_pages_and_copies() -> None:
    """26B-A4B in 4 bits: 14.5 GB mapped and as many repacked; a machine of 16 GB runs it."""
    memory = MemoryPlan(process=50_000_000, weights=14_500_000_000, repacked=14_000_000_000, cache=300_000_000, buffers=400_000_000)
    assert memory.total > 29e9
    assert memory.enough == 15_250_000_000
    assert memory.minimum(2.4e9) == 3_150_000_000
    assert memory.minimum(99e9) == memory.enough


def test_every_profile_gives_a_plan(exported_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = open_bundle(exported_pair, check="none").manifest
    for name in profiles():
        assert manifest_plan(manifest, speed_profile(name, None), context=512).plain.low > 0
    with pytest.raises(DeviceError, match="there is no device profile 'toaster'"):
        speed_profile("toaster", None)
    unmeasured = replace(profiles()["x86-server"], peak_gb_per_s=None, effective_gb_per_s=None)
    monkeypatch.setattr(speed_profile_module, "profile", lambda _: unmeasured)
    with pytest.raises(RequestError, match="x86-server has no memory speed, since it differs between machines"):
        speed_profile("x86-server", None)


def test_a_gpu_is_planned_from_the_memory_it_shares_and_labelled(run: Any) -> None:
    processors, gpu = speed_profile("snapdragon-x", None), speed_profile("snapdragon-x", None, accelerator="gpu")
    peak = (profiles()["snapdragon-x"].peak_gb_per_s or 0) * 1e9
    assert processors.bandwidth.high < gpu.bandwidth.high < peak
    result = run("--json", "--profile", "snapdragon-x", "--device", "gpu")
    planned = json.loads(result.stdout)["plan"]
    assert planned["device"].startswith("gpu of ")
    assert "estimated, as nothing was measured on one" in planned["derived"]["plain"]
    assert run("--device", "abacus").exit_code == 1
    refused = run("--profile", "snapdragon-x", "--device", "abacus")
    assert refused.exit_code == 1
    assert "a profile has the devices cpu, gpu, npu" in refused.stderr
    on_cpu = run("--json", "--profile", "snapdragon-x", "--device", "CPU")
    assert not json.loads(on_cpu.stdout)["plan"]["device"].startswith("CPU of")


def test_the_split_drafter_is_planned_where_there_is_one(exported_pair: Path) -> None:
    manifest, speed = open_bundle(exported_pair, check="none").manifest, speed_profile("raspberry-pi-5", None)
    split, dense = (manifest_plan(manifest, speed, context=512, drafter=kind) for kind in ("split", "dense"))
    assert manifest_plan(manifest, speed, context=512).step_seconds == split.step_seconds
    assert split.step_seconds.middle < dense.step_seconds.middle
    with pytest.raises(RequestError, match="needs a model and a dense or split drafter"):
        manifest_plan(manifest, speed, context=512, drafter="lookup")
    with pytest.raises(RequestError, match="but the bundle has none"):
        manifest_plan(MANIFEST, speed, context=512)


def test_this_machine_is_probed() -> None:
    assert 1e8 < product_operations(2) < 1e14
    speed = speed_profile(None, 1)
    assert "this machine" in speed.name
    assert "shares the processor's memory" in speed_profile(None, 1, accelerator="gpu").bandwidth_from
    assert speed.operations is not None


def test_measured_figures_stand_beside_their_predictions() -> None:
    actual = plan()
    measured = Measured(
        memory_bytes=10**12,
        prefill=actual.prefill.middle,
        plain=2 * actual.plain.middle,
        drafted=1.0,
        step_seconds=actual.step_seconds.middle,
        verify_seconds=actual.verify_seconds,
        draft_length=0.0,
    )
    lines = {line.split()[0]: line for line in plan_lines(actual, measured)}
    assert "+0%, in range" in lines["prefill"]
    assert "-50%, OUT OF RANGE" in lines["plain"]
    assert "OUT OF RANGE" in lines["memory"]
    assert "how:" in lines
    assert "not known" in lines["J/token"]


@pytest.fixture
def run(exported_pair: Path, probe_memory: None):
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(cli.main, ["plan", str(exported_pair), *arguments])

    return call


def test_a_plan_of_what_is_not_exported_names_the_other_command() -> None:
    result = CliRunner().invoke(cli.main, ["plan", "google/gemma 4"])
    assert result.exit_code == 1
    assert "google/gemma 4 is not a bundle" in result.stderr
    assert result.stderr.rstrip().endswith("edge-export plan 'google/gemma 4'")


def test_a_plan_of_a_bundle_opens_no_model(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli_options, "open_session", lambda *_, **__: pytest.fail("a model was opened"))
    (tmp_path / "watts.json").write_text('{"draft": 2, "verify": 4}')
    result = run("--json", "--profile", "raspberry-pi-5", "--phase-power", str(tmp_path / "watts.json"))
    actual = json.loads(result.stdout)["plan"]
    assert actual["joules_per_token"]["low"] > actual["joules_per_prompt_token"]["low"] > 0
    assert actual["prompt_tokens"] == 1024, "the bundle's context is shorter than 2000"
    assert actual["first_token_seconds"]["low"] > 0
    assert set(actual["draft_length"]) == {"low", "middle", "high"}
    assert actual["memory"]["total"] > actual["memory"]["reserved"] > 0


def test_a_plan_is_held_against_this_machine(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_profile_module, "product_operations", lambda processors: 5e10)
    result = run("--measure", "--json", "--threads", "1")
    record = json.loads(result.stdout)
    assert record["measured"]["plain"] > 0
    assert len(record["measured"]["verify_seconds"]) == 13
    assert record["plan"]["device"].startswith("this machine")


@pytest.mark.parametrize("arguments", [("--port", "1"), ("--measure", "--profile", "apple-m")])
def test_contradictions_are_usage_errors(run: Any, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def planned(available: float | None, drafted: float = 5.0, enough: int = 3_000_000_000) -> SpeedPlan:
    memory = MemoryPlan(process=0, weights=enough, repacked=0, cache=0, buffers=0)
    return replace(
        plan(), memory=memory, memory_available=None if available is None else int(available), drafted=Range.between(drafted / 2, drafted)
    )


@pytest.mark.parametrize(
    ("made", "fits", "words"),
    [
        (planned(8 * GB), True, "yes: 3.00 GB of memory are enough, 8.00 GB are available"),
        (planned(2 * GB), False, "no: it needs 3.00 GB of memory and 2.00 GB are available"),
        (planned(None), True, "for devices with 4 GB and more"),
        (planned(None, enough=90_000_000_000), True, "for more than 64 GB"),
        (planned(8 * GB, drafted=2.0), False, "no: about 1.4 tokens per second"),
        (replace(planned(None, enough=10_000_000_000), largest_gb=16), True, "for devices with 16 GB and more"),
        (replace(planned(None, enough=13_000_000_000), largest_gb=16), False, "needs 13.00 GB of memory, and the device has 16 GB at most"),
    ],
)
def test_the_plan_decides(made: SpeedPlan, fits: bool, words: str) -> None:
    assert made.decision()[0] is fits
    assert words in made.decision()[1]
    assert plan_lines(made)[1].split("  ")[-1] == made.decision()[1]
    assert made.to_json()["fits"] is fits


def test_a_busy_machine_is_named() -> None:
    assert "busy" not in "\n".join(plan_lines(plan()))
    assert plan_lines(replace(plan(), load="other programs used 89%"))[2].endswith("say: other programs used 89%")


def test_a_plan_says_what_the_export_keeps() -> None:
    kept = {"rows": 501, "mean_kl": 0.14, "perplexity": 94.0, "reference_perplexity": 87.0, "greedy_agreement": 0.81}
    files = tuple(BundleFile(path=role, role=role, format="gguf", bytes=1_000_000, sha256="0" * 64) for role in ("target", "drafter"))
    made = manifest_plan(replace(MANIFEST, files=files, parity={"quality": kept}), device(20, 4000), context=64)
    words = "keeps 81% of the model's first choices, perplexity 94 instead of 87 (mean KL 0.14)"
    assert made.to_json()["answers"] == words
    assert plan_lines(made)[2].split(maxsplit=1) == ["answers", words]
    assert "answers" not in "\n".join(plan_lines(plan()))


def test_onnx_graphs_are_planned() -> None:
    files = [("target", "onnx", 10), ("target_data", "onnx_data", 1_000_000), ("target_head", "onnx", 5), ("drafter", "onnx", 1_000)]
    entries = [BundleFile(path=role, role=role, format=kind, bytes=size, sha256="0" * 64) for role, kind, size in files]
    graphs = replace(MANIFEST, files=tuple(entries))
    made = manifest_plan(graphs, device(20, 4000), context=64)
    assert (made.memory.weights, made.memory.repacked) == (0, 1_001_015), "all weights are packed"
    assert made.memory.mapped_copies == 1_000_015, "the drafter's are in memory"
    copied = manifest_plan(graphs, device(20, 4000), context=64, packed_cache=False).memory
    assert (copied.total, copied.reserved) == (made.memory.total, made.memory.reserved + 1_000_015)
    assert made.memory.minimum(1.0) == made.memory.enough
    own = replace(graphs.architecture, per_layer_size=8)
    own = replace(own, parameters=4 * own.vocab_size * own.layers * 8)
    tabled = manifest_plan(replace(graphs, architecture=own), device(20, 4000), context=64).memory
    assert (tabled.weights, tabled.repacked) == (1_001_015 // 4, 1_001_015 - 1_001_015 // 4)
    assert tabled.total == tabled.mapped - 1_001_015 // 4, "few rows of a table are read"
    mapped = [BundleFile(path=role, role=role, format="gguf", bytes=9_000, sha256="0" * 64) for role in ("target", "drafter")]
    both = manifest_plan(replace(graphs, files=(*entries, *mapped)), device(20, 4000), context=64)
    assert both.memory.weights == 18_000, "a bundle of both is planned by its GGUF files"


def test_a_bundle_of_both_formats_is_planned_for_the_backend_that_is_asked_for() -> None:
    def entries(kind: str, size: int) -> list[BundleFile]:
        return [BundleFile(path=f"{role}.{kind}", role=role, format=kind, bytes=size, sha256="0" * 64) for role in ("target", "drafter")]

    graphs, mapped = entries("onnx", 1_000), entries("gguf", 9_000)
    both = replace(MANIFEST, files=(*graphs, *mapped))
    for backend, files in {"onnx": graphs, "llama": mapped, None: (*graphs, *mapped)}.items():
        assert of_backend(both, backend) == replace(MANIFEST, files=tuple(files))
    assert manifest_plan(of_backend(both, "onnx"), device(20, 4000), context=64).memory.repacked == 2_000
    with pytest.raises(RequestError, match="a plan needs a model"):
        manifest_plan(of_backend(replace(MANIFEST, files=tuple(graphs)), "llama"), device(20, 4000), context=64)


def test_an_unsure_plan_says_which_measurement_would_narrow_it() -> None:
    sure = Range(low=9.0, middle=10.0, high=12.0)
    plain = replace(plan(), prefill=sure, plain=sure, drafted=sure)
    assert "narrower" not in "\n".join(plan_lines(plain))
    (line,) = [line for line in plan_lines(replace(plain, prefill=Range(low=2.0, middle=10.0, high=44.0))) if "narrower" in line]
    assert "prefill is known within a factor of 22 only: `edge-run plan BUNDLE --measure` on the device" in line


POTATO, LITERT = "github.com/potato-os/core/pull/269", "ai.google.dev/edge/litert-lm/overview"
LAPTOP = "pt13762104.github.io, 6 June 2026"
NO_MEMORY = MemoryPlan(process=0, weights=0, repacked=0, cache=0, buffers=0)


def facts(*, read: float, head: float, bits: float, layers: int, prompt: float | None = None) -> PairFacts:
    """Sizes of a published model: weights that each token reads, of them the head's and those of a prompt's, and bits per weight."""
    return PairFacts(
        target_bytes=read * bits / 8,
        step_bytes=60e6,
        parameters=read,
        head_parameters=head,
        prompt_parameters=read - head if prompt is None else prompt,
        drafter_parameters=78e6,
        layers=layers,
        drafter_layers=4,
        kv_bytes=40e6,
    )


# Weights without the per-layer embedding tables, which are looked up. Q4_K_M: 3.11 GB of 4.6 G weights.
E2B_Q4_K_M = facts(read=2.25e9, head=0.40e9, bits=5.4, layers=35)
E2B_Q4_0 = facts(read=2.25e9, head=0.40e9, bits=4.5, layers=35)
# Of the runtimes LiteRT-LM alone computes no more of a prompt than K and V need.
E2B_K_AND_V = facts(read=2.25e9, head=0.40e9, bits=4.5, layers=35, prompt=0.53e9)
E4B_Q4_0 = facts(read=4.6e9, head=0.67e9, bits=4.5, layers=42)
PUBLISHED = [
    # profile, pair, runtime, source, decode tok/s, prefill tok/s (None: not published)
    ("raspberry-pi-5", "E2B Q4_K_M", E2B_Q4_K_M, "llama.cpp", POTATO, 6.44, 31.98),
    ("raspberry-pi-5", "E2B Q4_K_M", E2B_Q4_K_M, "ik_llama", POTATO, 7.30, 46.72),
    ("raspberry-pi-5", "E2B 4 bits", E2B_K_AND_V, "LiteRT-LM", LITERT, 8.0, 133.0),
    ("raspberry-pi-5", "E4B Q4_0", E4B_Q4_0, "llama.cpp", POTATO, 2.79, 18.86),
    ("raspberry-pi-5", "E4B Q4_0", E4B_Q4_0, "ik_llama", POTATO, 3.07, 19.18),
    ("raspberry-pi-4", "E2B Q4_K_M", E2B_Q4_K_M, "llama.cpp", POTATO, 1.75, 4.36),
    ("raspberry-pi-4", "E4B Q4_0", E4B_Q4_0, "llama.cpp", POTATO, 0.98, 2.18),
    ("x86-laptop", "E2B Q4_0", E2B_Q4_0, "llama.cpp, i7-10750H", LAPTOP, 20.48, 84.24),
    ("x86-laptop", "E2B 4 bits", E2B_K_AND_V, "LiteRT-LM, i7-10750H", LAPTOP, 20.45, 211.37),
    ("apple-m", "E2B 4 bits", E2B_K_AND_V, "LiteRT-LM, M4", LITERT, 42.0, 901.0),
]


@pytest.mark.parametrize(("profile", "pair", "sizes", "runtime", "source", "decode", "prefill"), PUBLISHED)
def test_published_speeds_are_in_the_predicted_ranges(profile, pair, sizes, runtime, source, decode, prefill):
    plan = speed_plan(sizes, speed_profile(profile, None), NO_MEMORY, 8, None)
    print(
        f"| {profile} | {pair} | {runtime} | {decode:g} | {plan.plain.middle:.2g} [{plan.plain.low:.2g}, {plan.plain.high:.2g}] |"
        f" {prefill:g} | {plan.prefill.middle:.2g} [{plan.prefill.low:.2g}, {plan.prefill.high:.2g}] | {source} |"
    )
    assert plan.plain.low <= decode <= plan.plain.high
    assert plan.prefill.low <= prefill <= plan.prefill.high
