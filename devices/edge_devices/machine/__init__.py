"""What this machine is and the state it is in: CPUs, memory, bandwidth, power supply, heat, profile."""
