"""`python -m edge_runtime.bench`: the command where no script of it is installed."""

from __future__ import annotations

from edge_runtime.bench.cli import main

if __name__ == "__main__":
    main()
