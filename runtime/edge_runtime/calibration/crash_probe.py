"""Finds out in a child process whether llama.cpp survives this machine, before it is loaded into the user's.

A build can die by a signal on the processor it runs on: one made for AMX does on virtual machines that only claim to have it, as soon
as a batch has a few rows of quantized weights. Without weight repacking (`use_extra_bufts`) it lives. The answer is remembered.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from edge_devices.files.user_cache import CACHE_VARIABLE, cache_folder, cache_put, read_entries
from edge_devices.machine.facts import cpu_identity, usable_processors
from edge_runtime.backends.llama.library import library_version, system_info
from edge_runtime.calibration.child_process import ask_child
from edge_runtime.errors import BackendError, EdgeRuntimeError

CACHE_NAME = "probe.json"
TIMEOUT_SECONDS = 120.0
CHILD_COMMAND = (sys.executable, "-m", "edge_runtime.calibration.crash_probe")
_ROWS = 8
_CONTEXT = 256
# What -DGGML_NATIVE=ON finds on such a machine, less AMX.
_WORKAROUND_X86 = (
    "-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_BMI2=ON -DGGML_FMA=ON -DGGML_F16C=ON "
    "-DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"
)
_WORKAROUND_OTHER = "-DGGML_NATIVE=OFF"


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    """How to load models on this machine. `reason` is a sentence; `from_cache` tells that no child was started this time."""

    use_extra_bufts: bool
    from_cache: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class CachedProbe:
    """What an earlier probe on this machine found out about files of these quantizations (target's first)."""

    quantizations: tuple[str, ...]
    use_extra_bufts: bool


def probe_load_options(
    target_path: Path,
    drafter_path: Path | None,
    quantizations: Sequence[str],
    *,
    notify: Callable[[str], None],
    child_command: Sequence[str] = CHILD_COMMAND,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> ProbeAnswer:
    """Returns the load options that a child process survived with these files, from memory if the same machine was asked before.

    `notify` gets one sentence when a probe starts and one when a safer option was chosen. Raises BackendError if the files do not
    load, or if no option keeps the child alive: the sentence names the signal and the build that cures it.
    """
    key, cache = machine_key(quantizations), cache_path()
    remembered = _remembered(read_entries(cache).get(key))
    if remembered is not None:
        return ProbeAnswer(use_extra_bufts=remembered.use_extra_bufts, from_cache=True, reason="an earlier probe on this machine said so")
    notify(f"First use with {' and '.join(dict.fromkeys(quantizations))} on this machine: trying llama.cpp in a child process.")
    command = [*child_command, "--target", str(target_path.resolve())]
    if drafter_path is not None:
        command += ["--drafter", str(drafter_path.resolve())]
    death = _run(command, timeout_seconds)
    if death is None:
        answer = ProbeAnswer(use_extra_bufts=True, from_cache=False, reason="the child decoded with all of llama.cpp's kernels")
    else:
        second = _run([*command, "--no-extra-bufts"], timeout_seconds)
        if second is not None:
            raise BackendError(
                f"llama.cpp does not work on this machine: its child process {death}, without repacking it {second}; {workaround(library_version())}"
            )
        reason = f"llama.cpp's child process {death} with weight repacking and works without it"
        answer = ProbeAnswer(use_extra_bufts=False, from_cache=False, reason=reason)
        notify(f"{reason[0].upper()}{reason[1:]}, so it is off and prompts are slower; {workaround(library_version())}")
    kept = {"quantizations": list(quantizations), "use_extra_bufts": answer.use_extra_bufts}
    error = cache_put(cache, key, kept)
    if error is not None:
        notify(f"The probe's answer could not be kept in {cache} ({error}); set {CACHE_VARIABLE} to a folder that can be written.")
    return answer


def cached_probes() -> list[CachedProbe]:
    """Returns the answers that hold for this machine and this build of llama.cpp, the newest last; what is damaged is passed over."""
    found = [(key, _remembered(entry)) for key, entry in read_entries(cache_path()).items()]
    return [one for key, one in found if one is not None and key == machine_key(one.quantizations)]


def machine_key(quantizations: Sequence[str]) -> str:
    """Returns the sha256 under which an answer is remembered: processor, library version and build, quantizations of the files."""
    facts = [cpu_identity(), platform.machine(), library_version(), system_info(), list(quantizations)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def cache_path() -> Path:
    """Returns where answers are remembered: probe.json in $EDGE_MTP_CACHE, or in ~/.cache/edge-mtp."""
    return cache_folder() / CACHE_NAME


def _remembered(entry: object) -> CachedProbe | None:
    """Returns what one entry says; None if there is none or it is damaged."""
    if not isinstance(entry, dict):
        return None
    quantizations, answer = entry.get("quantizations"), entry.get("use_extra_bufts")
    if not isinstance(answer, bool) or not isinstance(quantizations, list) or not all(isinstance(q, str) for q in quantizations):
        return None
    return CachedProbe(quantizations=tuple(quantizations), use_extra_bufts=answer)


def _run(command: Sequence[str], timeout_seconds: float) -> str | None:
    """Runs a child. Returns None if it lived, else how it ended; raises BackendError with the child's sentence if it gave one."""
    child = ask_child(command, timeout_seconds)
    sentence = child.answer.get("error")
    if isinstance(sentence, str):
        raise BackendError(sentence)
    if child.end is None and child.answer.get("alive") is not True:
        return "ended with exit code 0"
    return child.end


def workaround(version: str) -> str:
    """Returns how to build this version of llama-cpp-python for less than it finds on this machine."""
    flags = _WORKAROUND_X86 if platform.machine().lower() in {"x86_64", "amd64"} else _WORKAROUND_OTHER
    build = f"pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python=={version}"
    return f'to cure it, build it for less than it finds: CMAKE_ARGS="{flags}" {build}'


def decode_few_rows(target_path: Path, drafter_path: Path | None, use_extra_bufts: bool) -> None:
    """What the child does: loads the files, decodes one row, then eight, then one draft step. Raises BackendError or dies."""
    from edge_runtime.backends.llama.context import LlamaOptions
    from edge_runtime.backends.llama.open import open_pair

    options = LlamaOptions(context=_CONTEXT, threads=min(4, usable_processors()), batch=64, use_extra_bufts=use_extra_bufts)
    target, drafter = open_pair(target_path, drafter_path, options)
    with target:
        first = max(target.vocabulary.bos, 0)
        target.verify([first])
        target.verify([first] * _ROWS)
        if drafter is not None:
            drafter.draft(first, 1)


@click.command()
@click.option("--target", "target_path", required=True, type=click.Path(path_type=Path))
@click.option("--drafter", "drafter_path", type=click.Path(path_type=Path))
@click.option("--no-extra-bufts", is_flag=True, help="Load without weight repacking.")
def main(target_path: Path, drafter_path: Path | None, no_extra_bufts: bool) -> None:
    """Decodes a few rows and prints {"alive": true}, or {"error": "..."} with exit code 1."""
    try:
        decode_few_rows(target_path, drafter_path, not no_extra_bufts)
    except EdgeRuntimeError as error:
        click.echo(json.dumps({"error": str(error)}))
        raise SystemExit(1) from error
    click.echo(json.dumps({"alive": True}))


if __name__ == "__main__":
    main()
