"""Joules per token of one run, from the best energy meter of this machine, or the reason for a missing figure.

python examples/energy_of_a_run.py my-bundle
"""

import sys

import edge_runtime
from edge_devices import EnergyWatch, System, choose_meter, find_meters

if len(sys.argv) != 2:
    sys.exit("usage: python examples/energy_of_a_run.py my-bundle")

system = System()
meter = choose_meter(find_meters(system))  # None without a meter; the line printed below states it

with edge_runtime.open_session(sys.argv[1]) as session:
    with EnergyWatch(system, meter) as watch:
        generation = session.generate("class Queue:", max_tokens=200)
        text = "".join(generation)
    # Gross energy, idle power included; `edge-bench run --energy` follows the whole protocol of docs/measure-energy.md.
    print(f"{generation.stats.tokens} tokens: {watch.energy(generation.stats.tokens).sentence()}")
