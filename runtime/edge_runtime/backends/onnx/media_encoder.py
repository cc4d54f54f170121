"""The encoders of images and sound on onnxruntime: one graph for each, loaded at its first use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.onnx.devices import Graph, SessionOptions, value_over
from edge_runtime.bundle.onnx_graph import check_onnx
from edge_runtime.errors import BundleError, RequestError
from edge_runtime.media.encoder_inputs import MELS, PATCH, POOLING, Image, Sound

# The audio tower attends in blocks: rows of a block, how far back a row attends, and the score of rows that it does not attend to.
_BLOCK, _REACH, _MASKED = 12, 12, -1e9
_INPUTS = {"image": {"patches", "x", "y"}, "sound": {"mels", "filler", "mask"}}


class OrtMediaEncoder:
    """The encoders of a bundle, on the CPU. Implements `media.soft_rows.Encoder`."""

    def __init__(self, image: Path, sound: Path | None, threads: int, width: int) -> None:
        """`width` is the hidden size of the target. No file is opened yet."""
        self._paths, self._options, self._width = {"image": image, "sound": sound}, SessionOptions(threads=threads), width
        self._graphs: dict[str, Graph] = {}

    def encode(self, media: Image | Sound) -> NDArray[np.float32]:
        """Returns the soft rows [rows, hidden size]. Raises RequestError for sound without an audio tower, BackendError if it fails."""
        if isinstance(media, Image):
            return self._image(media, self._graph("image"))
        return self._sound(media, self._graph("sound"))

    def close(self) -> None:
        """Frees the graphs. Can be called twice."""
        self._graphs.clear()

    def _image(self, image: Image, graph: Graph) -> NDArray[np.float32]:
        order = grouped(image)
        x, y = image.positions()[order].T
        return self._run(graph, {"patches": image.patches()[order][None], "x": x, "y": y})

    def _sound(self, sound: Sound, graph: Graph) -> NDArray[np.float32]:
        # At least one row of filler, because onnxruntime copies an empty array instead of sharing its memory (`value_over`).
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
            path = self._paths[kind]
            if path is None:
                raise RequestError("this bundle's encoder takes images only; leave the sound out")
            check_onnx(path)
            graph = Graph(path, self._options)
            mels = graph.inputs.get("mels", (MELS,))[-1:]
            if set(graph.inputs) != _INPUTS[kind] or mels != (MELS,) or graph.outputs.get("rows", ())[-1:] != (self._width,):
                raise BundleError(f"{path} is no encoder of this model; export the bundle again")
            self._graphs[kind] = graph
        return self._graphs[kind]

    def _run(self, graph: Graph, inputs: Mapping[str, NDArray[np.generic]]) -> NDArray[np.float32]:
        kept = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        call = graph.bind({name: value_over(array) for name, array in kept.items()}, {"rows": None})
        call.run()
        rows: NDArray[np.float32] = call.outputs()[0][0].copy()
        return rows


def grouped(image: Image) -> NDArray[np.int64]:
    """Returns the indexes of an image's patches, ordered so that the POOLING x POOLING patches of each soft row are neighbours."""
    height, width = (side // PATCH // POOLING for side in image.rgb.shape[:2])
    grid = np.arange(POOLING * POOLING * height * width).reshape(height, POOLING, width, POOLING)
    return grid.transpose(0, 2, 1, 3).reshape(-1)


def block_masks(blocks: int) -> NDArray[np.float32]:
    """Returns masks to add to attention scores [blocks, 1, 12, 24]: the rows of each block by those of the block before and its own."""
    back = np.arange(_BLOCK)[:, None] + _BLOCK - np.arange(2 * _BLOCK)
    masks = np.repeat(np.where((back >= 0) & (back < _REACH), 0.0, _MASKED).astype(np.float32)[None, None], blocks, axis=0)
    masks[0, :, :, :_BLOCK] = _MASKED
    return masks
