"""A module for each interface: how its requests are read and its answers written."""
