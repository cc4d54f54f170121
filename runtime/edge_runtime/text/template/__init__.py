"""jinja2 for chat templates from outside: a sandbox with its filters and limits."""
