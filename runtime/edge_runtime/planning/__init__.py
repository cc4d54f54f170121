"""Predictions for a pair before it is opened: memory, speed, joules."""
