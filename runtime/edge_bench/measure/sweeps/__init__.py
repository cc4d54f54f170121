"""Measurements over a list of values: clients at once, types of KV cache, sizes of images."""
