"""The tools of a request, and what it demands of the answer: JSON, text of a grammar, or a call by `tool_choice`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from edge_devices.machine.device_package import how_to_get
from edge_runtime.server.requests.fields import Fields
from edge_runtime.text.constraints import Gbnf, JsonSchema, ToolCalls

MAX_TOOLS = 128
CONSTRAINT_FIELDS = frozenset({"grammar", "json_schema", "response_format"})
Tools = tuple[Mapping[str, Any], ...]


def read_tools(body: Fields) -> Tools:
    """Returns the function declarations; none if tool_choice is "none". Raises ApiError.

    Tools of other types, which their servers run, are left out, and functions that a tool_choice of allowed tools does not name.
    """
    tools = []
    for fields in body.objects("tools", MAX_TOOLS):
        if (kind := fields.text("type")) != "function":
            left_out(fields, kind)
            continue
        function = fields.inner("function")
        if not function.text("name"):
            raise function.wrong("name", "is missing; name the function")
        declared = {
            "name": function.text("name"),
            "description": function.text("description", ""),
            "parameters": function.object("parameters"),
        }
        tools.append({key: value for key, value in declared.items() if value is not None})
    if body.get("tool_choice") == "none":
        return ()
    allowed = _allowed(body)
    return tuple({"type": "function", "function": tool} for tool in tools if allowed is None or tool["name"] in allowed)


def left_out(tool: Fields, kind: str | None) -> None:
    """Notes a tool that is no function. Raises ApiError for one without a type."""
    if not kind:
        raise tool.wrong("type", "is missing; a tool is of the type 'function'")
    tool.remarks.append(f"a tool of the type {kind[:40]!r} is left out; this server runs none, a client runs functions")


def read_constraint(fields: Fields, tools: Sequence[Mapping[str, Any]]) -> Gbnf | JsonSchema | ToolCalls | None:
    """Returns the constraint of a chat request that declares `tools`. Raises ApiError."""
    declared = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    demanded, text = _tool_calls(fields, declared), read_text_constraint(fields)
    if isinstance(text, Gbnf) and tools:
        raise fields.wrong("grammar", "cannot be combined with tools; leave one of them out")
    if isinstance(text, JsonSchema) and tools and demanded is None:
        return ToolCalls(tuple(declared.items()), several=fields.flag("parallel_tool_calls", True), answer=text)
    return demanded or text


def read_text_constraint(fields: Fields) -> Gbnf | JsonSchema | None:
    """Returns what the answer's text must be: JSON by `response_format` or llama-server's `json_schema`, or of its `grammar`."""
    schema = _json_schema(fields)
    if (top := fields.object("json_schema")) is not None:
        _require_library(fields, "json_schema")
        schema = schema or JsonSchema(top)
    grammar = fields.text("grammar")
    if not grammar:
        return schema
    if schema is not None:
        raise fields.wrong("grammar", "cannot be combined with a JSON schema; leave one of them out")
    _require_library(fields, "grammar")
    return Gbnf(grammar)


def _tool_calls(fields: Fields, declared: Mapping[str, Mapping[str, Any] | None]) -> ToolCalls | None:
    choice = fields.get("tool_choice")
    chosen = fields.inner("tool_choice") if isinstance(choice, dict) else Fields({})
    if chosen.text("type") == "allowed_tools":
        choice = chosen.inner("allowed_tools").choice("mode", ("auto", "required"), "auto")
    if choice in (None, "auto", "none"):
        return None
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


def _allowed(body: Fields) -> set[str] | None:
    """Returns the names of the functions that a tool_choice of the type `allowed_tools` leaves; None for other choices."""
    if not isinstance(body.get("tool_choice"), dict):
        return None
    choice = body.inner("tool_choice")
    if choice.text("type") != "allowed_tools":
        return None
    tools = choice.inner("allowed_tools").objects("tools", MAX_TOOLS)
    return {tool.inner("function").text("name") or tool.text("name") or "" for tool in tools}


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
