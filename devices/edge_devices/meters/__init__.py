"""Energy meters by system or maker. Each module lists its meters in `SOURCES`, and `search` collects them."""
