"""The package gguf. The only module that imports it; the others take it from here."""

import gguf

__all__ = ["gguf"]
