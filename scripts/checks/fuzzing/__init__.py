"""Parts of scripts/checks/fuzz.py: mutated inputs, the readers that get them, and the child process that watches over each."""
