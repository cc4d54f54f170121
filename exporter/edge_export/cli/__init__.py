"""edge-export: command and progress display."""
