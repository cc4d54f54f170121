"""Safe reading and writing of files: atomic writes, size-limited reads, hashes, typed JSON, protobuf fields, the per-user cache."""
