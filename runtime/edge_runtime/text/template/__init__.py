"""jinja2 for chat templates from outside: as transformers sets it up, in a limited child process."""
