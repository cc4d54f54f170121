"""Reads images and sounds from files or bytes. A child process decodes them, so that a hostile file can at most end the child."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from edge_devices.children import ChildBudget, Limits, import_paths, limited_command, run_child
from edge_devices.errors import errors_as
from edge_devices.files.limited_read import read_at_most
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.media.encoder_inputs import (
    BUDGETS,
    DEFAULT_BUDGET,
    MAX_FILE_BYTES,
    MAX_SAMPLES,
    SIDE,
    Image,
    Sound,
    check_budget,
    kind_of,
)

TIMEOUT_SECONDS = 60
# Address space, including that of libraries. A picture of the largest size needs 0.6 GB.
MAX_MEMORY_BYTES = 2 << 30
MAX_CPU_SECONDS = 30
# A line of JSON, and four bytes for each sample or three for each pixel.
_MAX_ANSWER_BYTES = 4096 + max(4 * MAX_SAMPLES, 3 * SIDE**2 * max(BUDGETS))
# The libraries' thread pools would use up the child's address space.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def read_media(source: Path | str | bytes, budget: int = DEFAULT_BUDGET, children: ChildBudget | None = None) -> Image | Sound:
    """Returns the image or the sound in a file or its bytes: resized to at most `budget` soft rows, or cut at 30 seconds.

    `children` limits the processor time together with other calls, and can cancel the decoding.

    Raises RequestError for a file that cannot be read, is damaged or exceeds a limit in `encoder_inputs`, and for an unknown budget.
    Raises BackendError if the library that decodes the format is missing. The message names the file.
    """
    check_budget(budget)
    name = "the media data" if isinstance(source, bytes) else str(source)
    with errors_as(RequestError, f"{name} cannot be read", "choose another file"):
        data = source if isinstance(source, bytes) else read_at_most(Path(source), MAX_FILE_BYTES)
    if len(data) > MAX_FILE_BYTES:
        raise RequestError(f"{name} has {len(data)} bytes, at most {MAX_FILE_BYTES} are allowed; reduce it")
    try:
        return _decoded(data, budget, children or ChildBudget())
    except (RequestError, BackendError) as error:
        raise type(error)(f"{name}: {error}") from error


def read_image(source: Path | str | bytes, budget: int = DEFAULT_BUDGET, children: ChildBudget | None = None) -> Image:
    """As `read_media`, for images only."""
    media = read_media(source, budget, children)
    if not isinstance(media, Image):
        raise RequestError("the file is a sound, not an image; give it as sound")
    return media


def read_sound(source: Path | str | bytes, children: ChildBudget | None = None) -> Sound:
    """As `read_media`, for sounds only."""
    media = read_media(source, children=children)
    if not isinstance(media, Sound):
        raise RequestError("the file is an image, not a sound; give it as image")
    return media


def _command(budget: int, cpu_seconds: float) -> tuple[str, ...]:
    limits = Limits(memory_bytes=MAX_MEMORY_BYTES, cpu_seconds=cpu_seconds, writes_files=False)
    return limited_command("edge_runtime.media.decoder", str(budget), limits=limits)


def _decoded(data: bytes, budget: int, children: ChildBudget) -> Image | Sound:
    kind = kind_of(data)
    child = run_child(
        _command(budget, min(MAX_CPU_SECONDS, children.cpu_seconds_left)),
        data,
        seconds=TIMEOUT_SECONDS,
        output_bytes=_MAX_ANSWER_BYTES,
        environment=import_paths() | _ENVIRONMENT,
        budget=children,
        failure=BackendError,
    )
    if child.late:
        raise RequestError(f"decoding took more than {TIMEOUT_SECONDS} seconds; convert it")
    if child.cancelled:
        raise RequestError("its decoding was ended, as its request was, or took too much time; send less")
    line, _, body = child.output.partition(b"\n")
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    answer = answer if isinstance(answer, dict) else {}
    if "error" in answer:
        raise (BackendError if answer.get("missing") else RequestError)(str(answer["error"]))
    shape = answer.get("shape")
    if child.end or not isinstance(shape, list) or not all(type(side) is int for side in shape):
        raise RequestError("it cannot be decoded within the limits of memory and time; convert it")
    return _checked(kind, shape, body, budget)


def _checked(kind: str, shape: list[int], body: bytes, budget: int) -> Image | Sound:
    """Checks the child's answer, because the child has read bytes that may be hostile. Raises RequestError."""
    if kind == "image":
        fits = len(shape) == 3 and shape[2] == 3 and not shape[0] % SIDE and not shape[1] % SIDE
        fits = fits and 0 < shape[0] * shape[1] <= budget * SIDE**2
    else:
        fits = len(shape) == 1 and 0 < shape[0] <= MAX_SAMPLES
    if not fits or len(body) != math.prod(shape) * (1 if kind == "image" else 4):
        raise RequestError("its decoder gave no usable answer; convert it")
    if kind == "image":
        return Image(np.frombuffer(body, np.uint8).reshape(shape))
    samples = np.frombuffer(body, np.float32)
    if not np.isfinite(samples).all():
        raise RequestError("its decoder gave no usable answer; convert it")
    return Sound(samples)
