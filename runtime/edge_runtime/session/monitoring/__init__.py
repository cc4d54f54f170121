"""Counts and events of a session: callbacks, a log file, Prometheus metrics."""
