"""edge-export: command, progress display, Optimum's subcommand."""
