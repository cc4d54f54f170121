"""Backends: a folder per library, each behind the interfaces `Target` and `Drafter`."""
