"""A saved conversation: one JSON file with messages and settings, untrusted when read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from edge_devices.errors import errors_as
from edge_devices.files.atomic_write import atomic_write
from edge_devices.files.limited_read import read_at_most
from edge_devices.files.typed_json import StructureError, from_json, to_json
from edge_runtime.errors import RequestError

FORMAT = "edge-mtp chat"
VERSION = 1
MAX_BYTES = 64 << 20
ROLES = ("user", "assistant", "tool")

Settings = TypeVar("Settings", bound=Any)


def save(path: Path, settings: Any, messages: Sequence[dict[str, Any]]) -> None:
    """Writes the file atomically. Raises RequestError, and leaves an existing file unchanged, if that fails."""
    data = to_json(settings)
    # JSON has neither integer keys nor infinity.
    data["sampling"]["logit_bias"] = {str(k): "-inf" if v == -math.inf else v for k, v in settings.sampling.logit_bias.items()}
    record = {"format": FORMAT, "version": VERSION, "settings": data, "messages": list(messages)}
    with errors_as(RequestError, f"the conversation cannot be saved to {path}", "choose another file", OSError, ValueError):
        atomic_write(path, [json.dumps(record, ensure_ascii=False, indent=1, allow_nan=False).encode(), b"\n"])


def load(path: Path, settings_type: type[Settings]) -> tuple[Settings, list[dict[str, Any]]]:
    """Reads settings and messages. Raises RequestError, with the place of the first fault, for a file that `save` did not write."""
    causes = OSError, ValueError, RecursionError, StructureError
    with errors_as(RequestError, f"{path} cannot be read as a conversation", "choose a file that /save wrote", *causes):
        record = json.loads(read_at_most(path, MAX_BYTES).decode())
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise StructureError("it is not a saved conversation")
        if record.get("version") != VERSION:
            raise RequestError(f"{path} has version {record.get('version')!r}, this reader supports {VERSION}; upgrade edge-mtp")
        messages = record.get("messages")
        if not isinstance(messages, list):
            raise StructureError("messages is not a list")
        return _settings(settings_type, record.get("settings")), [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _settings(settings_type: type[Settings], data: Any) -> Settings:
    sampling = data.get("sampling") if isinstance(data, dict) else None
    if not isinstance(sampling, dict):
        raise StructureError("settings.sampling is missing")
    bias = sampling.get("logit_bias", {})
    plain = {key: value for key, value in sampling.items() if key != "logit_bias"}
    settings = from_json(settings_type, data | {"sampling": plain}, "settings")
    try:
        biases = {int(key): float(value) for key, value in bias.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise StructureError(f"settings.sampling.logit_bias is {str(bias)[:40]!r}, not ids with numbers") from error
    return replace(settings, sampling=replace(settings.sampling, logit_bias=biases))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise StructureError(f"{where} has none of the roles {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str):
        raise StructureError(f"{where}.content is not text")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise StructureError(f"{where}.tool_calls is not a list")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(call.get("id"), str):
            raise StructureError(f"{where}.tool_calls[{i}] is not a function call")
    return message
