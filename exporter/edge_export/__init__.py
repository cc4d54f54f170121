"""The exporter, which runs on a build host and turns Gemma 4 checkpoints into a bundle.

The names below are the public interface. Each is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import edge_devices as edge_devices  # switches telemetry off before a library is imported

if TYPE_CHECKING:
    from edge_devices.waiting import Progress
    from edge_export.checkpoint.sources import reference_pair
    from edge_export.onnx.request import OnnxRequest
    from edge_export.pipeline.export import export_pair
    from edge_export.pipeline.request import ExportRequest

_HOMES = {
    "ExportRequest": "edge_export.pipeline.request",
    "OnnxRequest": "edge_export.onnx.request",
    "Progress": "edge_devices.waiting",
    "export_pair": "edge_export.pipeline.export",
    "reference_pair": "edge_export.checkpoint.sources",
}
__all__ = ["ExportRequest", "OnnxRequest", "Progress", "export_pair", "reference_pair"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge_export' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
