"""Writing GGUF files, the split drafter included."""
