"""The header of a file of records: which bundle, machine, versions and settings the measurements behind it are of."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import PurePath
from typing import Any

from edge_bench.measure.records import SCHEMA, Header, ModelFile
from edge_devices.machine.detection import detect_device
from edge_devices.machine.facts import installed_version
from edge_devices.machine.system import System
from edge_runtime.bundle.bundle import Bundle

# The distributions of the backends' engines.
ENGINES = ("llama-cpp-python", "onnxruntime")


def new_header(bundle: Bundle, settings: Mapping[str, Any], *, planned: int | None = None, row_kernels: str | None = None) -> Header:
    """Returns the header of a measurement of a bundle on this machine, beginning now. `planned` and `row_kernels`: as in `Header`.

    It holds no names of people or machines, no serial numbers, and of paths the last part only.
    """
    source, device = bundle.manifest.sources.get("target"), detect_device(System())
    return Header(
        schema=SCHEMA,
        version=version("edge-mtp"),
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        bundle=bundle.folder.resolve().name,
        target=PurePath(source.origin).name if source else "",
        files=tuple(
            ModelFile(role=file.role, format=file.format, quantization=file.quantization, bytes=file.bytes, sha256=file.sha256)
            for file in bundle.manifest.files
        ),
        machine=asdict(device.machine) | {"model": device.model, "soc": device.soc},
        settings=dict(settings),
        engines={name: number for name in ENGINES if (number := installed_version(name))},
        planned=planned,
        row_kernels=row_kernels,
        run=secrets.token_hex(8),
    )
