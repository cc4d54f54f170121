"""Work on hostile input in child processes whose time and memory the system limits."""
