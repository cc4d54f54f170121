"""From meter readings to joules per token: recording, windows, statistics, protocol, report, live figures."""
