"""Put a bundle on phones or boards, run the benchmark there, bring the results home: `edge-bench` with devices, as a script.

    python scripts/adb_bench.py BUNDLE --package DIR --adb all --lengths 2,3,4 --html report.html
    python scripts/adb_bench.py BUNDLE --package DIR --ssh pi@raspberrypi

Everything it takes is in `edge-bench devices --help`, every step in docs/devices.md.
"""

from __future__ import annotations

import sys

from edge_bench.cli.main import main

if __name__ == "__main__":
    main(["devices", *sys.argv[1:]], prog_name="adb_bench.py")
