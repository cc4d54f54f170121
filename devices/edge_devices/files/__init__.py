"""Reads and writes files safely: atomic writes, size-limited reads, hashes, typed JSON, protobuf fields, and the user's cache."""
