"""A model of llama.cpp with a context on it."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edge_runtime.backends.llama.context import LlamaOptions, load_model
from edge_runtime.backends.llama.library import library
from edge_runtime.bundle.gguf_gemma4 import check_model


class LlamaModel:
    """A model of llama.cpp and a context on it, freed exactly once. Close it, or use it as a context manager."""

    def __init__(self, path: Path, architecture: str, options: LlamaOptions) -> None:
        """Raises BackendError if the file is not sound, of another architecture, or does not load."""
        self._library = library()
        self._api = self._library.api
        self._pointer: Any = None
        self.header = check_model(path, architecture)
        self._model: Any = load_model(self._library, path, options)

    def close(self) -> None:
        """Frees the context and the model. Harmless when done twice."""
        if self._pointer is not None:
            self._api.llama_free(self._pointer)
            self._pointer = None
        if self._model is not None:
            self._api.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
