"""Fuzzes the readers of edge-mtp with mutated inputs and reports the results.

    python scripts/checks/fuzz.py manifest config --inputs 100000 --seed 1
    python scripts/checks/fuzz.py all --inputs 1000 --bundle my-bundle
    python scripts/checks/fuzz.py manifest --seed 1 --show 4711 > input
    python scripts/checks/fuzz.py gguf-model gguf-weights --bundle my-bundle --sanitize build/kernels --first 100000

Every input must be read, or refused with an error of the package, within 10 seconds and in memory proportional to its size. No file outside
the folder may be opened and no code run. Figures: docs/security.md. Linux only (fork).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from edge_runtime.backends.kernels import loader
from edge_runtime.backends.kernels.build import build, host_target
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import MEDIA_ENCODER
from fuzz_kernels import SANITIZERS
from fuzzing import device_readers, export_readers, gguf_readers, graph_readers, model_readers, runtime_readers
from fuzzing.campaign import Report, make_input, run_campaign
from fuzzing.readers import Reader

# By name.
READERS: dict[str, Reader] = {
    reader.name: reader
    for module in (runtime_readers, export_readers, device_readers, model_readers, gguf_readers, graph_readers)
    for reader in module.READERS
}
# The file that a bundle has for readers that need it.
FILES = {"gguf": ("target", "gguf"), "encoder": (MEDIA_ENCODER, "gguf"), "graphs": ("drafter", "onnx")}


def chosen(names: tuple[str, ...], bundle: Path | None) -> list[Reader]:
    """Returns the readers of these names; "all" returns all that can be opened. Raises UsageError for an unknown name."""
    if names == ("all",):
        opened = open_bundle(bundle) if bundle is not None else None
        return [reader for reader in READERS.values() if not reader.needs or (opened and opened.has(*FILES[reader.needs]))]
    for name in names:
        if name not in READERS:
            raise click.UsageError(f"there is no reader {name!r}; choose from {', '.join(READERS)}, or all")
        if READERS[name].needs and bundle is None:
            kind = "ONNX graphs" if READERS[name].needs == "graphs" else "GGUF files"
            raise click.UsageError(f"{name} needs an exported bundle of {kind}; give --bundle")
    return [READERS[name] for name in names]


def sanitize(folder: Path) -> None:
    """Has this process and its children run row kernels that trap undefined behaviour; they are built in `folder`, which takes minutes."""
    target = host_target()
    if target is None:
        raise click.UsageError("there are no row kernels for this machine; leave --sanitize out")
    loader.FOLDER = build(target, folder, SANITIZERS).parent


def sentence(report: Report) -> str:
    """Returns a summary in one line."""
    return (
        f"{report.reader}: {report.inputs} inputs, {report.read} read, {report.refused} refused, {len(report.failures)} failures; "
        f"{report.seconds:.0f} s, slowest {report.slowest_ms:.0f} ms"
    )


@click.command(context_settings={"show_default": True})
@click.argument("names", nargs=-1, required=True, metavar="READER...")
@click.option("--inputs", type=click.IntRange(min=1), default=100_000, help="Inputs per reader.")
@click.option("--seed", default=1)
@click.option("--first", default=0, help="Number of the first input, to continue a campaign.")
@click.option(
    "--bundle",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A bundle of GGUF files, or of ONNX graphs, for the readers that need a model.",
)
@click.option("--show", type=int, help="Only write the input of this number to standard output.")
@click.option(
    "--sanitize",
    "kernels",
    type=click.Path(path_type=Path, file_okay=False),
    help="Build the row kernels in this folder so that undefined behaviour ends the process.",
)
def main(names: tuple[str, ...], inputs: int, seed: int, first: int, bundle: Path | None, kernels: Path | None, show: int | None) -> None:
    """Fuzz each READER, or all of them with "all". Exit code 1 if any input failed."""
    failed = False
    if kernels is not None:
        sanitize(kernels)
    if bundle is not None:
        gguf_readers.pack_by_row_kernels()
    for reader in chosen(names, bundle):
        if show is not None:
            with tempfile.TemporaryDirectory() as folder:
                sys.stdout.buffer.write(make_input(reader.open(Path(folder) / "work", bundle), seed, show))
            return
        report = run_campaign(reader, inputs, seed, bundle, first=first)
        click.echo(sentence(report))
        for failure in report.failures[:10]:
            click.echo(f"  input {failure.number}: {failure.kind}: {failure.what}")
        failed |= bool(report.failures)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
