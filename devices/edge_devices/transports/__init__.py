"""Ways to another machine: one interface for this machine, a phone behind adb, and a host behind ssh."""
