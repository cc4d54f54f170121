"""Compares exports with transformers."""
