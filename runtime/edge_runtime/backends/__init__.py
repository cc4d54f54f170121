"""Backends: one module per library, each behind the `Target` and `Drafter` seam of `base`."""
