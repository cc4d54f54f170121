"""Writes GGUF files, including that of a drafter's sparse head."""
