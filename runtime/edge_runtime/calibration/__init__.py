"""What is measured on first use of a pair on a machine, and cached: crash probe, costs, threads, watts, acceptance."""
