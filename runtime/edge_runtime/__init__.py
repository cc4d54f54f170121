"""The device's floor: a bundle in, tokens out.

with edge_runtime.open_session("bundle") as session:
    generation = session.generate("def fibonacci(n):", max_tokens=64)
    for piece in generation:
        print(piece, end="", flush=True)
    print(generation.stats.acceptance_rate)
"""

from edge_runtime.bundle import Bundle, open_bundle
from edge_runtime.constraint import Gbnf, JsonSchema, Regex
from edge_runtime.errors import BackendError, BundleError, EdgeRuntimeError, RequestError
from edge_runtime.sampling import SamplingParams
from edge_runtime.session import Generation, Session, open_session
from edge_runtime.stats import DecodeStats

__all__ = [
    "BackendError",
    "Bundle",
    "BundleError",
    "DecodeStats",
    "EdgeRuntimeError",
    "Gbnf",
    "Generation",
    "JsonSchema",
    "Regex",
    "RequestError",
    "SamplingParams",
    "Session",
    "open_bundle",
    "open_session",
]
