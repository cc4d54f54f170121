"""Builds a folder with everything that runs bundles on a device: Python with its own loader, backends, edge_runtime, edge_devices."""
