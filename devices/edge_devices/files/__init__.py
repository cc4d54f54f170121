"""Reading and writing files safely, for the whole project: atomic writes, size-limited reads, hashes, typed JSON, protobuf fields, the per-user cache."""
