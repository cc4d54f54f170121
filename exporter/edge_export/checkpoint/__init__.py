"""Reads sources, which are not trusted: hub ids, folders, safetensors, GGUF, tokenizers."""
