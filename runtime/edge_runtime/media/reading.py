"""Reads images and sounds from files or bytes. They are decoded in a child process, so that a hostile file can at most end the child."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from edge_devices.child_python import module_command
from edge_devices.files.limited_read import read_at_most
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.media.formats import MAX_FILE_BYTES, kind_of
from edge_runtime.media.image import DEFAULT_BUDGET, SIDE, Image, check_budget
from edge_runtime.media.sound import MAX_SAMPLES, Sound

TIMEOUT_SECONDS = 60
_COMMAND = module_command("edge_runtime.media.decoder_process")
# The libraries' thread pools would use the child's address space up.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def read_media(source: Path | str | bytes, budget: int = DEFAULT_BUDGET) -> Image | Sound:
    """Returns the image, resized to at most `budget` soft rows, or the first 30 seconds of the sound, of a file or of its bytes.

    Raises RequestError for a file that cannot be read, is damaged or beyond the limits of `formats`, or for an unknown budget;
    BackendError if the library that decodes the format is missing. The message names the file.
    """
    check_budget(budget)
    name = "the media data" if isinstance(source, bytes) else str(source)
    try:
        data = source if isinstance(source, bytes) else read_at_most(Path(source), MAX_FILE_BYTES)
    except OSError as error:
        raise RequestError(f"{name} cannot be read ({error.strerror or error}); choose another file") from error
    if len(data) > MAX_FILE_BYTES:
        raise RequestError(f"{name} has {len(data)} bytes, at most {MAX_FILE_BYTES} are allowed; reduce it")
    try:
        return _decoded(data, budget)
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from error
    except BackendError as error:
        raise BackendError(f"{name}: {error}") from error


def read_image(source: Path | str | bytes, budget: int = DEFAULT_BUDGET) -> Image:
    """Like `read_media`, for an image only."""
    media = read_media(source, budget)
    if not isinstance(media, Image):
        raise RequestError("the file is a sound, not an image; give it as sound")
    return media


def read_sound(source: Path | str | bytes) -> Sound:
    """Like `read_media`, for a sound only."""
    media = read_media(source)
    if not isinstance(media, Sound):
        raise RequestError("the file is an image, not a sound; give it as image")
    return media


def _decoded(data: bytes, budget: int) -> Image | Sound:
    kind = kind_of(data)
    # The paths of this process, so that the child imports the same package wherever it lies.
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        child = subprocess.run(
            [*_COMMAND, str(budget)], input=data, capture_output=True, timeout=TIMEOUT_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RequestError(f"decoding took more than {TIMEOUT_SECONDS} seconds; convert it") from error
    except OSError as error:
        raise BackendError(
            f"the process that decodes media could not be started ({error}); check that {sys.executable} can be run"
        ) from error
    line, _, body = child.stdout.partition(b"\n")
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    answer = answer if isinstance(answer, dict) else {}
    if "error" in answer:
        raise (BackendError if answer.get("missing") else RequestError)(str(answer["error"]))
    shape = answer.get("shape")
    if child.returncode or not isinstance(shape, list) or not all(type(side) is int for side in shape):
        raise RequestError("it cannot be decoded within the limits of memory and time; convert it")
    return _checked(kind, shape, body, budget)


def _checked(kind: str, shape: list[int], body: bytes, budget: int) -> Image | Sound:
    """The child has read hostile bytes, so its answer is checked too."""
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
