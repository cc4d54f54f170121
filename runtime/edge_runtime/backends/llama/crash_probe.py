"""Tests in a child process whether llama.cpp crashes on this machine, before it is loaded into the user's process.

A build can be killed by a signal on a processor that it does not suit. For example, a build for AMX dies on virtual machines that report
AMX without having it, as soon as a batch of a few rows meets quantized weights. Such a build works without weight repacking
(`use_extra_bufts`), and so without the project's own row kernels, which need repacked weights too. The result is cached under the types of
the weights that the files contain; the manifest is not trusted for this.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_devices.children import limited_command, print_answer, run_child
from edge_devices.files.user_cache import entry_key
from edge_devices.machine.device_package import this_package
from edge_devices.machine.processors import LoadWatch, cpu_identity, usable_processors
from edge_devices.waiting import Report, Waiting, silent_wait
from edge_runtime.backends.interface import CPU
from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.loader import library_version, llama_library, system_info
from edge_runtime.bundle.gguf_gemma4 import check_gguf
from edge_runtime.bundle.gguf_header import TENSOR_TYPES
from edge_runtime.calibration.measured import MeasuredValue
from edge_runtime.errors import BackendError

TIMEOUT_SECONDS = 120.0
CHILD_COMMAND = limited_command("edge_runtime.backends.llama.crash_probe")
_ROWS = 8
_CONTEXT = 256
# The flags that -DGGML_NATIVE=ON sets on a machine with AMX, without AMX itself.
_WORKAROUND_X86 = (
    "-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_BMI2=ON -DGGML_FMA=ON -DGGML_F16C=ON "
    "-DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"
)
_WORKAROUND_OTHER = "-DGGML_NATIVE=OFF"


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    """How to load models on this machine whose files contain weights of these `types`.

    `quantizations` are names for the user, the target's first. `reason` is a sentence. `late`: a child was killed because it did not
    answer in time.
    """

    quantizations: tuple[str, ...]
    types: tuple[str, ...]
    use_extra_bufts: bool
    reason: str
    late: bool


# Other programs cannot make a build crash, but they can make a child late; so only late answers are distrusted on a busy machine.
PROBES = MeasuredValue(
    kind="probe",
    value_class=ProbeAnswer,
    doing="trying llama.cpp in a child process",
    times=1,
    disturbed_by_load=lambda answer: answer.late,
)


def probe_load_options(
    target_path: Path,
    drafter_path: Path | None,
    quantizations: Sequence[str],
    *,
    notify: Callable[[str], None],
    hashes: Sequence[str] = (),
    child_command: Sequence[str] = CHILD_COMMAND,
    timeout_seconds: float = TIMEOUT_SECONDS,
    waiting: Waiting = silent_wait,
) -> ProbeAnswer:
    """Returns the load options with which a child process ran these files; cached for this machine and the files' weight types.

    `quantizations` are names for the user. If the `hashes` of the files are given, later calls need not read the files' headers.
    `notify` gets one sentence when a probe starts and one when a safer option was chosen. Raises BackendError if the files do not load, or
    if the child process dies with every option; the sentence then names the signal and, as a workaround, another build.
    """
    contents = machine_key(hashes)
    if hashes and (known := PROBES.known(contents)) is not None:
        return known.value
    types = tuple(weight_types(path) for path in (target_path, drafter_path) if path is not None)
    setup = _setup(target_path, drafter_path)

    def measure(_: Report, __: object) -> ProbeAnswer:
        notify(f"First use with {' and '.join(dict.fromkeys(quantizations))} on this machine: trying llama.cpp in a child process.")
        watch = LoadWatch()
        death, late = _run(child_command, setup, timeout_seconds)
        reason = "the child decoded with all of llama.cpp's kernels"
        if death is not None:
            second, second_late = _run(child_command, setup | {"use_extra_bufts": False}, timeout_seconds)
            late = late or second_late
            if second is not None:
                load = watch.load()
                advice = f"{load.words()}, close other programs and try again" if late and load.is_busy else workaround(library_version())
                raise BackendError(
                    f"llama.cpp does not work on this machine: its child process {death}, without repacking it {second}; {advice}"
                )
            reason = f"llama.cpp's child process {death} with weight repacking and works without it"
            notify(f"{reason[0].upper()}{reason[1:]}, so it is off and prompts are slower; {workaround(library_version())}")
        return ProbeAnswer(quantizations=tuple(quantizations), types=types, use_extra_bufts=death is None, reason=reason, late=late)

    answer = PROBES.known_or_measured(machine_key(types), measure, notify, waiting=waiting)
    if hashes and not answer.late:
        PROBES.keep(contents, answer, notify)
    return answer


@dataclass(frozen=True, kw_only=True)
class DeviceTrial:
    """Records that a child process decoded on this device."""

    device: str


DEVICE_TRIALS = MeasuredValue(
    kind="device trial",
    value_class=DeviceTrial,
    doing="trying the device in a child process",
    times=1,
    disturbed_by_load=lambda _: False,
)


def try_device(
    target_path: Path,
    drafter_path: Path | None,
    options: LlamaOptions,
    *,
    driver: str,
    notify: Callable[[str], None],
    waiting: Waiting,
) -> None:
    """Tries in a child process to decode on the device of the options, because a crashing driver would end this process.

    Success is cached for this driver and these weight types. Raises BackendError if the child died or reported an error.
    """
    files = [path for path in (target_path, drafter_path) if path is not None]
    setup = _setup(target_path, drafter_path) | {"device": options.device, "layers": options.device_layers}

    def measure(_: Report, __: object) -> DeviceTrial:
        death, _late = _run(CHILD_COMMAND, setup, TIMEOUT_SECONDS)
        if death is not None:
            raise BackendError(f"llama.cpp does not work on {options.device}: its child process {death}; leave --device out")
        return DeviceTrial(device=options.device)

    key = machine_key([*map(weight_types, files), options.device, str(options.device_layers), driver])
    DEVICE_TRIALS.known_or_measured(key, measure, notify, waiting=waiting)


def weight_types(path: Path) -> str:
    """Returns the names of the weight types in a GGUF file. Raises BackendError if its header is damaged."""
    types = {TENSOR_TYPES[info.type].name for info in check_gguf(path).tensors}
    return " ".join(sorted(types - {"f32"}) or ["f32"])


def cached_probes() -> list[ProbeAnswer]:
    """Returns the cached results for this machine and this build of llama.cpp, the newest last; skips damaged ones."""
    return [answer for key, answer in PROBES.kept() if key == machine_key(answer.types)]


def machine_key(files: Sequence[str]) -> str:
    """Returns the cache key of a result: a SHA-256 of the processor, the library's version and build, the kernels, and types or hashes."""
    facts = [cpu_identity(), platform.machine(), library_version(), system_info(), llama_library().row_kernels, list(files)]
    return entry_key(facts)


def _setup(target_path: Path, drafter_path: Path | None) -> dict[str, object]:
    """Returns the files as the arguments of `decode_few_rows`."""
    return {"target": str(target_path.resolve()), "drafter": None if drafter_path is None else str(drafter_path.resolve())}


def _run(command: Sequence[str], setup: Mapping[str, object], timeout_seconds: float) -> tuple[str | None, bool]:
    """Runs `decode_few_rows` with these arguments in a child process. Returns how it died, or None, and whether it was late.

    Raises BackendError with the child's sentence if the child reports an error.
    """
    child = run_child([*command, json.dumps(setup)], seconds=timeout_seconds, failure=BackendError)
    sentence = child.answer.get("error")
    if isinstance(sentence, str):
        raise BackendError(sentence)
    if child.end is None and child.answer.get("alive") is not True:
        return "ended with exit code 0", False
    return child.end, child.late


def workaround(version: str) -> str:
    """Returns the workaround as a sentence: build this version of llama-cpp-python without the CPU extensions that crash.

    A device package cannot be rebuilt on the device, so the sentence suggests the other backend there.
    """
    if this_package():
        return "a device package has no other build of llama.cpp; export the bundle with --format onnx"
    flags = _WORKAROUND_X86 if platform.machine().lower() in {"x86_64", "amd64"} else _WORKAROUND_OTHER
    build = f"pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python=={version}"
    return f'build llama-cpp-python without the CPU extensions that crash here: CMAKE_ARGS="{flags}" {build}'


def decode_few_rows(
    target: str, drafter: str | None, *, use_extra_bufts: bool = True, device: str = CPU, layers: int = -1
) -> dict[str, object]:
    """Runs in the child: loads the files, decodes one row, then eight rows, then drafts one token. Raises BackendError, or crashes."""
    from edge_runtime.backends.llama.pair import open_pair

    options = LlamaOptions(
        context=_CONTEXT,
        threads=min(4, usable_processors()),
        batch=64,
        use_extra_bufts=use_extra_bufts,
        device=device,
        device_layers=layers,
    )
    opened, drafts = open_pair(Path(target), None if drafter is None else Path(drafter), options)
    with opened:
        first = max(opened.vocabulary.bos, 0)
        opened.verify([first])
        opened.verify([first] * _ROWS)
        if drafts is not None:
            drafts.draft(first, 1)
    return {"alive": True}


if __name__ == "__main__":
    print_answer(lambda: decode_few_rows(**json.loads(sys.argv[1])))
