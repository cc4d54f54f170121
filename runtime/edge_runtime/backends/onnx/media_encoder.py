"""The encoders of images and sound on onnxruntime: a graph for each, loaded at its first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.onnx.encoder_place import device_encoder, runs_on_device
from edge_runtime.backends.onnx.loader import Graph, SessionOptions, value_over
from edge_runtime.bundle.onnx_graph import check_onnx
from edge_runtime.errors import BackendError, BundleError, RequestError
from edge_runtime.media.image import PATCH, POOLING, Image
from edge_runtime.media.sound import MELS, Sound

# The rows of a block of the audio tower's attention, the distance that it sees, and the score of what it does not.
_BLOCK, _REACH, _MASKED = 12, 12, -1e9
_INPUTS = {"image": {"patches", "x", "y"}, "sound": {"mels", "filler", "mask"}}
# What is encoded to compare a device with the CPU: an image of the usual 256 rows, ten seconds of sound.
_SAMPLES: dict[str, Callable[[], Image | Sound]] = {
    "image": lambda: Image(np.random.default_rng(1).integers(0, 256, (768, 768, 3), np.uint8)),
    "sound": lambda: Sound(np.random.default_rng(1).uniform(-0.5, 0.5, 160_000).astype(np.float32)),
}


class OrtMediaEncoder:
    """The encoders of a bundle, on a device where that is right and faster. Implements `media.soft_rows.Encoder`."""

    def __init__(
        self,
        image: Path,
        sound: Path | None,
        options: SessionOptions,
        width: int,
        *,
        identity: str = "",
        notify: Callable[[str], None] = lambda _: None,
        admit: Callable[[Image | Sound], None] = lambda _: None,
    ) -> None:
        """`width` is the hidden size of the target, `identity` stands for the files. Opens nothing.

        `admit` raises RequestError if the CPU has no memory to encode a sample.
        """
        self._paths, self._options, self._width = {"image": image, "sound": sound}, options, width
        self._identity, self._notify, self._admit = identity, notify, admit
        self._graphs: dict[str, Graph] = {}

    def encode(self, media: Image | Sound) -> NDArray[np.float32]:
        """Returns the soft rows [rows, hidden size]. Raises RequestError for sound without an audio tower, BackendError if it fails."""
        kind = "image" if isinstance(media, Image) else "sound"
        graph = self._graph(kind)
        try:
            return self._rows(media, graph)
        except BackendError as error:
            if graph.device.is_cpu:
                raise
            self._graphs[kind] = self._opened_instead(kind, error)
        return self._rows(media, self._graphs[kind])

    def close(self) -> None:
        """Frees the graphs. Can be called twice."""
        self._graphs.clear()

    def _rows(self, media: Image | Sound, graph: Graph) -> NDArray[np.float32]:
        return self._image(media, graph) if isinstance(media, Image) else self._sound(media, graph)

    def _image(self, image: Image, graph: Graph) -> NDArray[np.float32]:
        order = grouped(image)
        x, y = image.positions()[order].T
        return self._run(graph, {"patches": image.patches()[order][None], "x": x, "y": y})

    def _sound(self, sound: Sound, graph: Graph) -> NDArray[np.float32]:
        # At least one row of filler: onnxruntime copies empty arrays.
        blocks, size = sound.rows // _BLOCK + 1, graph.inputs["filler"][-1]
        if type(size) is not int or not 0 < size <= 1 << 16:
            raise BundleError(f"{graph.name} takes rows of {size!r} values; export the bundle again")
        inputs = {
            "mels": sound.mel_frames()[None, None],
            "filler": np.zeros((1, blocks * _BLOCK - sound.rows, size), np.float32),
            "mask": block_masks(blocks),
        }
        return self._run(graph, inputs)[: sound.rows]

    def _graph(self, kind: str) -> Graph:
        if kind not in self._graphs:
            path = self._path(kind)
            check_onnx(path)
            options = self._options if self._belongs_on_device(kind, path) else SessionOptions(threads=self._options.threads)
            try:
                self._graphs[kind] = self._opened(kind, path, options)
            except BackendError as error:
                if options.device.is_cpu:
                    raise
                self._graphs[kind] = self._opened_instead(kind, error)
        return self._graphs[kind]

    def _belongs_on_device(self, kind: str, path: Path) -> bool:
        if self._options.device.is_cpu:
            return False
        try:
            on_device, sentence = runs_on_device(path, self._identity, self._options, kind, partial(self._sample_rows, kind, path))
        except RequestError:  # no memory for the sample, which is compared when there is
            return False
        if sentence:
            self._notify(sentence)
        return on_device

    def _opened_instead(self, kind: str, error: BackendError) -> Graph:
        """Opens an encoder on the CPU that failed on the device."""
        self._notify(f"The encoder of {kind} failed on {self._options.device.name} and runs on the CPU from now on: {error}.")
        return self._opened(kind, self._path(kind), SessionOptions(threads=self._options.threads))

    def _path(self, kind: str) -> Path:
        path = self._paths[kind]
        if path is None:
            raise RequestError("this bundle's encoder takes images only; leave the sound out")
        return path

    def _opened(self, kind: str, path: Path, options: SessionOptions) -> Graph:
        graph = Graph(path, options) if options.device.is_cpu else device_encoder(path, options)
        mels = graph.inputs.get("mels", (MELS,))[-1:]
        if set(graph.inputs) != _INPUTS[kind] or mels != (MELS,) or graph.outputs.get("rows", ())[-1:] != (self._width,):
            raise BundleError(f"{path} is no encoder of this target; export the bundle again")
        return graph

    def _sample_rows(self, kind: str, path: Path, options: SessionOptions) -> Callable[[], NDArray[np.float32]]:
        sample = _SAMPLES[kind]()
        if options.device.is_cpu:
            self._admit(sample)
        graph = self._opened(kind, path, options)
        return lambda: self._rows(sample, graph)

    def _run(self, graph: Graph, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        kept = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        call = graph.bind({name: value_over(array) for name, array in kept.items()}, {"rows": None})
        call.run()
        rows: NDArray[np.float32] = call.outputs()[0][0].copy()
        if not graph.device.is_cpu and not np.isfinite(rows).all():
            raise BackendError("rows hold NaN")
        return rows


def grouped(image: Image) -> NDArray[np.int64]:
    """Returns the indexes of an image's patches in the order of soft rows, POOLING x POOLING for each."""
    height, width = (side // PATCH // POOLING for side in image.rgb.shape[:2])
    grid = np.arange(POOLING * POOLING * height * width).reshape(height, POOLING, width, POOLING)
    return grid.transpose(0, 2, 1, 3).reshape(-1)


def block_masks(blocks: int) -> NDArray[np.float32]:
    """Returns what is added to the scores [blocks, 1, 12, 24] of each block over the one before and itself."""
    back = np.arange(_BLOCK)[:, None] + _BLOCK - np.arange(2 * _BLOCK)
    masks = np.repeat(np.where((back >= 0) & (back < _REACH), 0.0, _MASKED).astype(np.float32)[None, None], blocks, axis=0)
    masks[0, :, :, :_BLOCK] = _MASKED
    return masks
