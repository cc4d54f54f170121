"""Facts about this machine and its state: CPUs, memory, bandwidth, power supply, heat, profile."""
