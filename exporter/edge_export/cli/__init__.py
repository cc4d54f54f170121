"""edge-export: start, command, progress display, Optimum's subcommand."""
