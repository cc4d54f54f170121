"""The command edge-export, and its progress display."""
