"""The device's floor: a bundle in, tokens out.

with edge_runtime.open_session("bundle") as session:
    generation = session.generate("def fibonacci(n):", max_tokens=64)
    for piece in generation:
        print(piece, end="", flush=True)
    print(generation.stats.acceptance_rate)
"""

from edge_runtime.bundle import Bundle, open_bundle
from edge_runtime.channels import Text, Thought
from edge_runtime.chat import Answer, Chat
from edge_runtime.constraint import Gbnf, JsonSchema, Regex
from edge_runtime.errors import BackendError, BundleError, EdgeRuntimeError, RequestError
from edge_runtime.generation import Generation
from edge_runtime.opening import open_session
from edge_runtime.sampling import SamplingParams
from edge_runtime.session import Session
from edge_runtime.stats import DecodeStats
from edge_runtime.tool_calls import ToolCall

__all__ = [
    "Answer",
    "BackendError",
    "Bundle",
    "BundleError",
    "Chat",
    "DecodeStats",
    "EdgeRuntimeError",
    "Gbnf",
    "Generation",
    "JsonSchema",
    "Regex",
    "RequestError",
    "SamplingParams",
    "Session",
    "Text",
    "Thought",
    "ToolCall",
    "open_bundle",
    "open_session",
]
