"""`edge-run doctor`: what works on this machine, found out and shown."""
