"""Writes the encoders of images and sound as ONNX graphs, each with a data file of its own, so that each can be loaded alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.media_architecture import AUDIO, VISION
from edge_export.gguf.media_encoder import media_architecture
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.media.audio import build_audio
from edge_export.onnx.media.tower import Tower
from edge_export.onnx.media.vision import build_vision
from edge_export.onnx.request import Block, MediaWeights, OnnxRequest, check_towers
from edge_export.onnx.weights import WeightFile, weight_format
from edge_export.output.atomic_folder import BundlePart
from edge_runtime.bundle.manifest import AUDIO_ENCODER, VISION_ENCODER

_BLOCK: Block = 32


def write_encoders(
    checkpoint: Checkpoint, weights: MediaWeights, folder: Path, progress: Callable[[int], None]
) -> tuple[tuple[BundlePart, ...], set[str]]:
    """Writes the graphs and data files; returns them, and the contrib operators in use. Raises CheckpointError."""
    media = media_architecture(checkpoint)
    vision, audio = check_towers(media)
    towers: list[tuple[str, str, Callable[[Tower], None]]] = [
        (VISION_ENCODER, VISION, lambda tower: build_vision(tower, vision, media.text_size))
    ]
    if audio is not None:
        towers.append((AUDIO_ENCODER, AUDIO, lambda tower: build_audio(tower, audio, media.text_size)))
    parts: list[BundlePart] = []
    contrib_ops: set[str] = set()
    for role, prefix, build in towers:
        path = folder / f"{role.replace('_', '-')}-{weights}.onnx"
        data = path.with_suffix(".onnx_data")
        format = weight_format(weights, OnnxRequest(block=_BLOCK))
        graph = GraphBuilder(role, kernels=format.kind == "blocks")
        with WeightFile(data, progress) as file:
            build(Tower(graph, checkpoint, file, format, prefix))
        graph.save(path)
        parts.append(BundlePart(role=role, path=path, format="onnx", quantization=weights))
        parts.append(BundlePart(role=f"{role}_data", path=data, format="onnx_data", quantization=weights))
        contrib_ops |= graph.contrib_ops
    return tuple(parts), contrib_ops
