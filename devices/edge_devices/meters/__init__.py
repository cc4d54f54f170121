"""Sources of energy readings, by system or maker: each module lists its meters in `SOURCES`, and `search` collects them."""
