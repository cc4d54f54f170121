"""One module for each API: how its requests are read and its answers written."""
