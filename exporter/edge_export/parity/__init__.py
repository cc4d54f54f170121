"""Comparison with transformers."""
