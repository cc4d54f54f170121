"""Measurements: what is run, in which order, and what is recorded about it."""
