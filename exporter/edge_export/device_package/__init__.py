"""A folder with everything that runs a bundle on a device: Python with its own loader, the backends, the two light packages."""
