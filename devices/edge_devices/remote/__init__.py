"""A job on another device: snapshot, preflight, monitor, what happened."""
