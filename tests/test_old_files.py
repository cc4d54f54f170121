"""Files that earlier versions wrote (`data/old`, by those versions' own code) are read, or refused with the sentence that helps.

Whoever changes a format keeps these passing, or raises its version and adds a file and a test here. Recordings of devices:
`devices/meters/fixtures`; the bundle's manifest of today: `data/manifest-2.json`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge_bench.devices.results import read_result
from edge_bench.measure.records import read_records
from edge_bench.report.figures import figures
from edge_devices.energy.report import make_report
from edge_devices.energy.run_log import read_log
from edge_devices.errors import DeviceError
from edge_devices.machine.device_package import read_package
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import RuntimeSettings
from edge_runtime.config.settings import defaults, read_config
from edge_runtime.errors import BundleError, RequestError
from edge_runtime.session.chat import load_chat
from edge_runtime.session.prompt_cache import SegmentFile

OLD = Path(__file__).parent / "data" / "old"


def copied(folder: Path, name: str, original: str, change: Callable[[str], str] = lambda text: text) -> Path:
    """Puts an old file into a folder under the name that its reader looks for."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(change((OLD / original).read_text()))
    return folder / name


def test_a_bundle_of_schema_1_is_exported_again(tmp_path: Path) -> None:
    copied(tmp_path, "manifest.json", "manifest-1.json")
    with pytest.raises(BundleError, match="has schema version 1, this reader supports 2; export the bundle again"):
        open_bundle(tmp_path)


def test_the_first_configuration_means_what_it_meant() -> None:
    """Defaults of its time that it spells out stay; keys that came later are not set."""
    old, now = read_config(OLD / "config-1.yaml"), defaults(RuntimeSettings())
    assert (old.drafter, old.streaming, old.verifier) == (now.drafter, now.streaming, now.verifier)
    assert (old.cache.overflow, now.cache.overflow, old.cache.kv_type) == ("stop", "drop_oldest", "f16")
    assert (old.tuning.policy, now.tuning.policy, old.tuning.max_horizon) == ("fixed", "profit", 8)
    assert (old.tuning.objective, old.tuning.slowdown) == (None, None)


FACTS = {"bundle": "ab" * 32, "engine": "llama", "kv_type": "f16", "rows": "16+8", "kernels": "cd" * 32}


def read_state(path: Path) -> tuple[list[int], list[bytes]]:
    with SegmentFile(path, FACTS, (16, 8)) as file:
        full, sliding = (np.empty((count, size), np.uint8) for count, size in ((file.header.tokens, 16), (file.header.sliding, 8)))
        tokens = file.read_full(full).tolist()
        file.read_sliding(sliding)
    return tokens, [full.tobytes(), sliding.tobytes()]


def test_rows_of_version_2_are_read() -> None:
    assert read_state(OLD / "state-2.kv") == ([1, 2, 3, 4, 5], [bytes(range(80)), bytes(range(40))])


@pytest.mark.parametrize("version", [1, 3])
def test_rows_of_another_version_are_refused(tmp_path: Path, version: int) -> None:
    (tmp_path / "state").write_bytes((OLD / "state-2.kv").read_bytes().replace(b'"version": 2', b'"version": %d' % version))
    with pytest.raises(RequestError, match=f"has version {version}, this reader supports 2"):
        read_state(tmp_path / "state")


def test_a_conversation_of_version_1_goes_on(tmp_path: Path) -> None:
    settings, messages = load_chat(OLD / "chat-1.json")
    assert (settings.system, settings.stop, settings.max_tokens) == ("Be brief.", ("END",), 64)
    assert (settings.sampling.top_k, settings.sampling.seed, settings.sampling.logit_bias) == (40, 5, {3: 1.5, 7: -math.inf})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}
    with pytest.raises(RequestError, match="has version 2, this reader supports 1; upgrade edge-mtp"):
        load_chat(copied(tmp_path, "chat.json", "chat-1.json", lambda text: text.replace('"version": 1', '"version": 2')))


def next_schema(text: str) -> str:
    assert text.count('"schema": 1') == 1
    return text.replace('"schema": 1', '"schema": 2')


UPGRADE = r"schema 2; this version reads 1: upgrade edge-mtp"


def test_runs_of_schema_1_give_their_figures(tmp_path: Path) -> None:
    actual = figures(read_records(OLD / "runs-1.jsonl"), None, None)
    speeds = {item.variant.label: item.tokens_per_second for item in actual.overall}
    assert speeds == {"plain": pytest.approx(19.9, rel=0.01), "dense 3": pytest.approx(39.8, rel=0.01)}
    assert actual.records.notes == ("a note",)
    with pytest.raises(RequestError, match=UPGRADE):
        read_records(copied(tmp_path, "runs.jsonl", "runs-1.jsonl", next_schema))


def test_an_energy_log_of_schema_1_gives_its_joules(tmp_path: Path) -> None:
    """The version that wrote it reported the same: 9 W in the 11 of 12 s that are not prefill, and 30 or 60 tokens."""
    report = make_report(read_log(OLD / "energy-1.jsonl"), baseline="plain")
    joules = {item.name: item.joules_per_output_token for item in report.variants}
    assert {name: item and item.value for name, item in joules.items()} == {
        "plain": pytest.approx(3.3),
        "draft": pytest.approx(1.65),
    }
    with pytest.raises(Exception, match=UPGRADE):
        read_log(copied(tmp_path, "energy.jsonl", "energy-1.jsonl", next_schema))


def test_a_device_result_of_schema_1_is_shown(tmp_path: Path) -> None:
    copied(tmp_path, "runs.jsonl", "runs-1.jsonl")
    path = copied(tmp_path, "device.json", "device-1.json")
    result = read_result(tmp_path)
    assert (result.label, result.happenings, result.hottest_c, result.charge_used) == ("adb:123 (Pixel)", ("throttled once",), 41.5, 3)
    path.write_text(next_schema(path.read_text()))
    with pytest.raises(RequestError, match=UPGRADE):
        read_result(tmp_path)


@pytest.mark.parametrize("schema", [1, 3])
def test_a_device_package_of_another_schema_is_built_again(tmp_path: Path, schema: int) -> None:
    path = copied(tmp_path, "package.json", "package-1.json", lambda text: text.replace('"schema": 1', f'"schema": {schema}'))
    (tmp_path / "bin").mkdir()
    for name in ("edge-python", "edge-bench"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
    with pytest.raises(DeviceError, match=f"has schema {schema}; this version reads 2: build the package again with this version"):
        read_package(tmp_path)
    path.write_text(path.read_text().replace(f'"schema": {schema}', '"schema": 2'))
    assert (read_package(tmp_path).platform, read_package(tmp_path).bytes) == ("linux-x64", 20)
    path.write_text(path.read_text().replace('"bytes": 10', '"bytes": 1e999'))
    with pytest.raises(DeviceError, match=r"cannot be read .*infinity"):
        read_package(tmp_path)
