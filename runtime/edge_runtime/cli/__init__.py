"""edge-run: the command, its option groups and its screens."""
