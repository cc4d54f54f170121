"""The tools of a request, and what it demands of the answer: JSON by `response_format`, or a call by `tool_choice`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from edge_devices.machine.device_package import how_to_get
from edge_runtime.server.requests.fields import Fields
from edge_runtime.text.constraints import JsonSchema, ToolCalls

MAX_TOOLS = 128


def read_tools(body: Fields) -> tuple[Mapping[str, Any], ...]:
    """Returns the function declarations; none if tool_choice is "none". Raises ApiError."""
    tools = []
    for fields in body.objects("tools", MAX_TOOLS):
        if fields.text("type") != "function":
            raise fields.wrong("type", "must be 'function'")
        function = fields.inner("function")
        if not function.text("name"):
            raise function.wrong("name", "is missing; name the function")
        declared = {
            "name": function.text("name"),
            "description": function.text("description", ""),
            "parameters": function.object("parameters"),
        }
        tools.append({"type": "function", "function": {key: value for key, value in declared.items() if value is not None}})
    return () if body.get("tool_choice") == "none" else tuple(tools)


def read_constraint(fields: Fields, tools: Sequence[Mapping[str, Any]]) -> JsonSchema | ToolCalls | None:
    """Returns the constraint of a chat request that declares `tools`. Raises ApiError."""
    declared = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    demanded, schema = _tool_calls(fields, declared), _json_schema(fields)
    if schema is not None and tools and demanded is None:
        return ToolCalls(tuple(declared.items()), several=fields.flag("parallel_tool_calls", True), answer=schema)
    return demanded or schema


def _tool_calls(fields: Fields, declared: Mapping[str, Mapping[str, Any] | None]) -> ToolCalls | None:
    choice = fields.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None
    chosen = Fields(choice, "tool_choice") if isinstance(choice, dict) else Fields({})
    name = chosen.inner("function").text("name") if chosen.text("type") == "function" else None
    if choice != "required" and not name:
        form = "{'type': 'function', 'function': {'name': NAME}}"
        raise fields.wrong("tool_choice", f"must be 'auto', 'none', 'required' or a function: {form}")
    if not declared:
        raise fields.wrong("tool_choice", "demands a call, but there are no tools; declare the function")
    if name is not None and name not in declared:
        raise fields.wrong("tool_choice", f"names {name[:60]!r}, which is not among the tools; declare it")
    _require_library(fields, "tool_choice")
    if name is not None:
        return ToolCalls(((name, declared[name]),))
    return ToolCalls(tuple(declared.items()), several=fields.flag("parallel_tool_calls", True))


def _json_schema(fields: Fields) -> JsonSchema | None:
    response_format = fields.inner("response_format")
    kind = response_format.choice("type", ("text", "json_object", "json_schema"), "text")
    if kind == "text":
        return None
    _require_library(fields, "response_format")
    if kind == "json_object":  # some clients send the schema beside it
        return JsonSchema(response_format.object("schema") or {"type": "object"})
    named = response_format.inner("json_schema")
    schema = named.object("schema")
    if schema is None:
        raise named.wrong("schema", "is missing; give the JSON schema of the answer")
    return JsonSchema(schema)


def _require_library(fields: Fields, name: str) -> None:
    if find_spec("llguidance") is None:
        raise fields.wrong(name, f"needs llguidance on the server; {how_to_get('grammar')}", code="unsupported_parameter")
