"""A benchmark loop of your own on a phone. Copy this file and change `benchmark`, which runs on the phone.

    python adb_bench.py my-bundle record.jsonl && edge-bench report record.jsonl

Here it makes the device package once, sends package, bundle and this file with adb, and fetches the record. There, the package's own
Python runs this file: nothing has to be installed on the phone, and a pulled cable does not end the loop.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import click


def benchmark(bundle: Path, record: Path) -> None:
    """Runs on the phone: plain decoding and two draft lengths, one prompt, five repeats. Each result is on the phone's disk at once."""
    from edge_bench.measure.benchmark import new_header
    from edge_bench.measure.records import BASELINE, RecordFile, edge_variants
    from edge_bench.measure.request import Prompt, prepare
    from edge_bench.measure.runners import EdgeRunner, mixed
    from edge_runtime import open_session

    with open_session(bundle) as session, RecordFile(record) as file:
        file.add(new_header(session.bundle, {"tokens": 32, "repeats": 5}))
        runner = EdgeRunner(session)
        prompts = prepare([Prompt(domain="mine", number=0, text="def fibonacci(n):")], session)
        runner.run(BASELINE, prompts[0], tokens=32)  # the first one warms up
        for repeat in range(5):
            for variant in mixed(edge_variants([session.drafter_kind], lengths=[2, 4], policies=[]), repeat):
                result = runner.run(variant, prompts[0], tokens=32, repeat=repeat)
                file.add(result)
                print(f"{variant.label}: {result.tokens / result.seconds:.1f} tok/s", flush=True)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--serial", help="The phone, where adb lists several.")
@click.option("--package", type=click.Path(path_type=Path), default="phone-package", help="Made where it is missing.", show_default=True)
@click.option("--on-the-phone", is_flag=True, hidden=True)
def main(bundle: Path, record: Path, serial: str | None, package: Path, on_the_phone: bool) -> None:
    """Measure BUNDLE on a phone with the loop of this file, and write RECORD for edge-bench report."""
    if on_the_phone:
        benchmark(bundle, record)
        return
    from edge_devices.remote.file_sync import pull_file, push_file
    from edge_devices.remote.jobs import JobState, poll_job, remove, start_job
    from edge_devices.remote.transport import AdbTransport, usable_serials

    serial = serial or usable_serials()[0]
    if not package.exists():
        subprocess.run(["edge-export", "package", "android-arm64", "-o", package], check=True)
    subprocess.run(["edge-bench", "devices", bundle, "--package", package, "--adb", serial, "--deploy-only"], check=True)
    phone = AdbTransport(serial)
    job, loop = f"{phone.folder}/runs/mine-{int(time.time())}", f"{phone.folder}/inputs/{Path(__file__).name}"
    push_file(phone, Path(__file__), loop)
    there = [f"{phone.folder}/bundles/{bundle.resolve().name}", f"{job}/record.jsonl"]
    python = ["env", f"EDGE_MTP_CACHE={phone.folder}/cache", f"{phone.folder}/package/bin/edge-python"]
    start_job(phone, job, [*python, loop, "--on-the-phone", *there])
    while (status := poll_job(phone, job, "record.jsonl")).state is JobState.RUNNING:
        click.echo(f"{status.records} records; {' '.join(status.log[-1:])}", err=True)
        time.sleep(2)
    for name in ("record.jsonl", "record.jsonl.partial"):  # the second one of a loop that was killed
        if phone.run(["test", "-s", f"{job}/{name}"]).code == 0:
            pull_file(phone, f"{job}/{name}", record)
    if status.exit_code != 0:
        raise click.ClickException(f"the loop ended with {status.exit_code or status.state}:\n" + "\n".join(status.log))
    remove(phone, job)


if __name__ == "__main__":
    main()
