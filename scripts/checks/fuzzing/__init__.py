"""Parts of scripts/checks/fuzz.py: mutated inputs, the readers that take them, and the child processes that run the readers."""
