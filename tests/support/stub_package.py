"""Device packages, a real one and one whose Python is this one and whose edge-bench plays a benchmark; a bundle that nothing decodes."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench_records import whole_benchmark
from edge_bench.measure.records import line_of
from edge_devices.energy.run_log import write_log
from edge_devices.energy.virtual_meters import PendingExternalMeter
from edge_devices.meters.base import Trace
from edge_devices.waiting import no_report
from edge_runtime.bundle.manifest import with_hash
from simulated_session import two_variants

ROOT = Path(__file__).parent.parent.parent
# Writes three records, waits while the file HOLD exists in our folder, then writes the rest. A file `oom` stands for a kernel without
# memory, `full` for a disk without room: nothing more is written, neither records nor the exit code.
BENCH = """#!/bin/sh
here="${0%/bin/*}"
echo "$@" > arguments
head -n 3 "$here/records.jsonl" > runs.jsonl.partial
echo "domains: 3 of 9" >&2
while test -e "$here/../hold"; do sleep 0.05; done
test -e "$here/../oom" && kill -KILL $$
test -e "$here/../full" && { ln -s /dev/full exit.new; echo "Error: runs.jsonl cannot be written (No space left on device)" >&2; exit 1; }
code="$(cat "$here/code")"
test "$code" = 0 || { rm runs.jsonl.partial; echo "Error: the model does not fit" >&2; exit "$code"; }
mv runs.jsonl.partial runs.jsonl
tail -n +4 "$here/records.jsonl" >> runs.jsonl
case "$*" in *"--meter external"*) cp "$here/pending.jsonl" energy.jsonl ;; *--energy*) cp "$here/energy.jsonl" . ;; esac
test -e "$here/../broken" && { rm energy.jsonl; echo "Error: the meter failed" >&2; exit 1; }
exit 0
"""
REAL_BENCH = """#!/bin/sh
exec "${0%/*}/edge-python" -P -c 'from edge_devices.entry_points import edge_bench_on_device as run; run()' "$@"
"""


def made_package(platform: str, folder: Path) -> Path:
    """A real package for onnxruntime; the test is skipped where the network does not bring its parts."""
    from edge_export.device_package.build import PackageRequest, make_package
    from edge_export.errors import PackageError

    try:
        make_package(PackageRequest(platform=platform, output=folder, backends=("onnx",)), lambda _: no_report)
    except PackageError as error:
        if not re.search("cannot be fetched|pip download failed", str(error)):
            raise
        pytest.skip(f"no package can be made here: {error}")
    return folder


def stub_package(folder: Path, *, platform: str = "linux-x64", code: int = 0, real: bool = False) -> Path:
    """Returns the package's folder; `code`: the exit code of its edge-bench; `real`: the real one, as far as a package holds it."""
    (folder / "bin").mkdir(parents=True)
    paths = ":".join(str(ROOT / floor) for floor in ("runtime", "devices"))
    if real:
        from edge_export.device_package.wheels import copy_packages

        copy_packages(folder / "lib")
        paths = "${0%/bin/*}/lib"
    programs = {
        "bin/edge-python": f'#!/bin/sh\nexport PYTHONPATH="{paths}" PYTHONDONTWRITEBYTECODE=1\nexec {sys.executable} "$@"\n',
        "bin/edge-bench": REAL_BENCH if real else BENCH,
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "records.jsonl").write_text("".join(line_of(record) for record in whole_benchmark()))
    (folder / "code").write_text(f"{code}\n")
    log = two_variants()
    write_log(folder / "energy.jsonl", log)
    facts = PendingExternalMeter().facts
    write_log(folder / "pending.jsonl", replace(log, facts=facts, trace=Trace(facts=facts)))
    files = [{"path": p.relative_to(folder).as_posix(), "bytes": p.stat().st_size, "sha256": ""} for p in folder.rglob("*") if p.is_file()]
    (folder / "package.json").write_text(json.dumps({"schema": 2, "platform": platform, "files": files, "sizes": {}, "licences": []}))
    return folder


def stub_bundle(folder: Path) -> Path:
    """Writes the bundle into a new folder and returns the folder: it opens, and its model is zeros."""
    folder.mkdir(parents=True)
    (folder / "target.gguf").write_bytes(zeros := bytes(100_000))
    data = json.loads((ROOT / "tests" / "data" / "manifest-2.json").read_text())
    data["files"] = [{**data["files"][0], "bytes": len(zeros), "sha256": hashlib.sha256(zeros).hexdigest()}]
    (folder / "manifest.json").write_text(with_hash(data))
    return folder
