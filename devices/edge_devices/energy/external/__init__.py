"""Reads the tables of external meters, which sit in the supply line."""
