"""`python -m edge_bench`: the command where no script of it is installed."""

from __future__ import annotations

from edge_devices.entry_points import edge_bench

if __name__ == "__main__":
    edge_bench()
