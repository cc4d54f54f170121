"""`python -m edge_bench`: runs the command if its script is not installed."""

from __future__ import annotations

from edge_devices.entry_points import edge_bench

if __name__ == "__main__":
    edge_bench()
