"""The runtime: a bundle in, tokens out.

with edge_runtime.open_session("bundle") as session:
    generation = session.generate("def fibonacci(n):", max_tokens=64)
    for piece in generation:
        print(piece, end="", flush=True)
    print(generation.stats.acceptance_rate)
"""

from __future__ import annotations

import edge_devices as edge_devices  # switches telemetry off before a library is imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from edge_runtime.bundle.bundle import Bundle, open_bundle
    from edge_runtime.cli.terminal import Explain
    from edge_runtime.decoding.loop import Round
    from edge_runtime.decoding.sampling import SamplingParams
    from edge_runtime.errors import BackendError, BundleError, EdgeRuntimeError, RequestError
    from edge_runtime.session.batch import Sessions
    from edge_runtime.session.chat import Answer, Chat, chat, generate
    from edge_runtime.session.generation import Generation
    from edge_runtime.session.load_options import LoadOptions
    from edge_runtime.session.monitor import DecodeStats, Monitor, MonitorOptions
    from edge_runtime.session.open import open_session, open_sessions
    from edge_runtime.session.session import Session
    from edge_runtime.text.channels import Text, Thought
    from edge_runtime.text.constraints import AfterThoughts, Gbnf, JsonSchema, Regex, ToolCalls
    from edge_runtime.text.tool_calls import ToolCall

_HOMES = {
    "AfterThoughts": "text.constraints",
    "Answer": "session.chat",
    "BackendError": "errors",
    "Bundle": "bundle.bundle",
    "BundleError": "errors",
    "Chat": "session.chat",
    "DecodeStats": "session.monitor",
    "EdgeRuntimeError": "errors",
    "Explain": "cli.terminal",
    "Gbnf": "text.constraints",
    "Generation": "session.generation",
    "JsonSchema": "text.constraints",
    "LoadOptions": "session.load_options",
    "Monitor": "session.monitor",
    "MonitorOptions": "session.monitor",
    "Regex": "text.constraints",
    "RequestError": "errors",
    "Round": "decoding.loop",
    "SamplingParams": "decoding.sampling",
    "Session": "session.session",
    "Sessions": "session.batch",
    "Text": "text.channels",
    "Thought": "text.channels",
    "ToolCall": "text.tool_calls",
    "ToolCalls": "text.constraints",
    "chat": "session.chat",
    "generate": "session.chat",
    "open_bundle": "bundle.bundle",
    "open_session": "session.open",
    "open_sessions": "session.open",
}
__all__ = [
    "AfterThoughts",
    "Answer",
    "BackendError",
    "Bundle",
    "BundleError",
    "Chat",
    "DecodeStats",
    "EdgeRuntimeError",
    "Explain",
    "Gbnf",
    "Generation",
    "JsonSchema",
    "LoadOptions",
    "Monitor",
    "MonitorOptions",
    "Regex",
    "RequestError",
    "Round",
    "SamplingParams",
    "Session",
    "Sessions",
    "Text",
    "Thought",
    "ToolCall",
    "ToolCalls",
    "chat",
    "generate",
    "open_bundle",
    "open_session",
    "open_sessions",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge_runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"edge_runtime.{_HOMES[name]}"), name)
