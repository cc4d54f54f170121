"""Turns meter readings into joules per token: recording, windows, statistics, protocol, report and live figures."""
