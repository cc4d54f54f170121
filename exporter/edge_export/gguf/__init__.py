"""Writing GGUF files, a drafter's sparse head included."""
