"""A folder with all that runs a bundle on a device: Python with its own loader, the backends, edge_runtime and edge_devices."""
