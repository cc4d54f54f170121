"""Meters in the supply line: their tables, and the offset of their clocks."""
