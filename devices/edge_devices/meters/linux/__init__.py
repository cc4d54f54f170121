"""Meters read from Linux kernel files."""
