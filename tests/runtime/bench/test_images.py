"""Sizes of images in the benchmark and in a plan, on a tiny random pair with an encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
pytest.importorskip("gguf", reason="needs edge-mtp[export]")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench_records import header
from edge_bench.measure.records import collect, line_of
from edge_bench.measure.sweeps import check_sizes, image_workloads, measure_image
from edge_bench.report.figures import figures
from edge_bench.report.tables import all_tables
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import VisionSize
from edge_runtime.cli.plan import measure_plan, plan_lines
from edge_runtime.drafting.energy_objective import PhasePower
from edge_runtime.errors import RequestError
from edge_runtime.planning.speed import Range, SpeedProfile, image_operations, manifest_plan
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session
from tiny_media import kept_media_pair

DEVICE = SpeedProfile(
    name="a board",
    bandwidth=Range.between(5e9, 10e9),
    bandwidth_from="assumed",
    operations=Range.between(20e9, 60e9),
    operations_from="assumed",
)


@pytest.fixture(scope="module")
def bundle() -> Path:
    return kept_media_pair(dtype="bfloat16", media="f16") / "bundle"


@pytest.fixture(scope="module")
def session(bundle, probe_memory) -> Session:
    with open_session(bundle, drafter="dense", threads=1) as session:
        yield session


def test_each_image_is_encoded(session):
    costs = [measure_image(session, 70, repeat) for repeat in range(3)]
    assert [cost.rows for cost in costs] == [64] * 3
    assert all(cost.encode_seconds > 0 and cost.prefill_seconds > 0 for cost in costs)
    measured = collect([header(), *costs])
    result = figures(measured)
    assert [(row.budget, row.rows) for row in result.images] == [(70, 64)]
    assert result.to_json()["images"][0]["encode_seconds"] == sorted(cost.encode_seconds for cost in costs)[1]
    assert [table.name for table in all_tables(result) if table.name == "images"]
    assert line_of(costs[0]).startswith('{"kind": "image", "budget": 70')


def test_a_meter_gets_the_encode_phase(session):
    work = image_workloads(session, [70])["image 70"]
    first, second = work(), work()
    assert set(first.phases) == {"encode", "prefill", "plain"}
    assert second.phases["encode"] > 0
    assert first.emitted_tokens == 1


def test_sizes_that_do_not_fit_are_refused(session, exported_pair, probe_memory):
    with pytest.raises(RequestError, match="cannot have 100 tokens"):
        check_sizes(session, [70, 100])
    with pytest.raises(RequestError, match="1089 tokens does not fit the context of 768"):
        check_sizes(session, [1120])
    with open_session(exported_pair, drafter="none", threads=1) as text_only, pytest.raises(RequestError, match="no encoder of images"):
        check_sizes(text_only, [70])
    check_sizes(session, [])


def test_the_operations_of_published_sizes():
    # 16 layers of 4 x 768^2 + 3 x 768 x 3072 weights for 2520 patches, their attention, patches and projection.
    assert image_operations(VisionSize(layers=16, hidden_size=768, feed_forward_size=3072), 1536, 280) == pytest.approx(1.076e12, rel=1e-3)
    assert image_operations(VisionSize(hidden_size=3840), 3840, 280) == pytest.approx(2.31e10, rel=1e-2)


def test_a_plan_has_the_encode_phase(bundle, session):
    manifest = open_bundle(bundle).manifest
    assert manifest.media is not None
    assert manifest.media.vision == VisionSize(layers=2, hidden_size=32, feed_forward_size=64)
    plan = manifest_plan(manifest, DEVICE, context=768, power=PhasePower(draft=3.0, verify=4.0))
    assert plan.image is not None
    assert plan.image.joules is not None
    seconds = plan.image.encode_seconds.middle + plan.image.prefill_seconds.middle
    assert plan.image.joules.middle == pytest.approx(4.0 * seconds)
    lines = plan_lines(plan, measure_plan(session, "what is this"))
    assert any(line.startswith("  image encode") and "measured" in line for line in lines)
    assert any(line.startswith("  J/image") for line in lines)
    assert any(line.startswith("  image: estimated") for line in lines)
    unknown = manifest_plan(manifest, DEVICE, context=768)
    assert unknown.image is not None
    assert unknown.image.joules is None
    assert manifest_plan(replace(manifest, media=None), DEVICE, context=768).image is None
