"""Measurements of a pair on this machine, made on first use and cached: costs, thread counts, watts, acceptance."""
