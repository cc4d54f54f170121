"""The device's floor: a bundle in, tokens out.

with edge_runtime.open_session("bundle") as session:
    generation = session.generate("def fibonacci(n):", max_tokens=64)
    for piece in generation:
        print(piece, end="", flush=True)
    print(generation.stats.acceptance_rate)
"""

from edge_runtime.bundle import Bundle, open_bundle
from edge_runtime.errors import BackendError, BundleError, EdgeRuntimeError, RequestError
from edge_runtime.generation import Generation
from edge_runtime.opening import open_session
from edge_runtime.sampling import SamplingParams
from edge_runtime.session import Session
from edge_runtime.stats import DecodeStats

__all__ = [
    "BackendError",
    "Bundle",
    "BundleError",
    "DecodeStats",
    "EdgeRuntimeError",
    "Generation",
    "RequestError",
    "SamplingParams",
    "Session",
    "open_bundle",
    "open_session",
]
