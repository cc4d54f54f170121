"""The runtime: a bundle in, tokens out.

with edge_runtime.open_session("bundle") as session:
    generation = session.generate("def fibonacci(n):", max_tokens=64)
    for piece in generation:
        print(piece, end="", flush=True)
    print(generation.stats.acceptance_rate)
"""

from typing import TYPE_CHECKING, Any

import edge_devices as edge_devices  # switches telemetry off before a library is imported
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.decoding.loop import Round
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.errors import BackendError, BundleError, EdgeRuntimeError, RequestError
from edge_runtime.session.batch import Sessions
from edge_runtime.session.chat import Answer, Chat
from edge_runtime.session.generation import Generation
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.monitoring.monitor import Monitor, MonitorOptions
from edge_runtime.session.one_call import chat, generate
from edge_runtime.session.open import open_session, open_sessions
from edge_runtime.session.session import Session
from edge_runtime.session.stats import DecodeStats
from edge_runtime.text.channels import Text, Thought
from edge_runtime.text.constraints import Gbnf, JsonSchema, Regex, ToolCalls
from edge_runtime.text.tool_calls import ToolCall

if TYPE_CHECKING:
    from edge_runtime.cli.terminal.screens import Explain

__all__ = [
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
    if name != "Explain":  # used by terminals only, so imported on first use
        raise AttributeError(f"module 'edge_runtime' has no attribute {name!r}")
    from edge_runtime.cli.terminal.screens import Explain

    return Explain
