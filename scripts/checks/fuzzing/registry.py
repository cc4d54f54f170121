"""All readers that can be fuzzed."""

from __future__ import annotations

from fuzzing.readers import Reader


def all_readers() -> dict[str, Reader]:
    """Returns all readers by name."""
    from fuzzing import device_readers, export_readers, gguf_readers, model_readers, runtime_readers

    found = [*runtime_readers.READERS, *export_readers.READERS, *device_readers.READERS, *model_readers.READERS, *gguf_readers.READERS]
    return {reader.name: reader for reader in found}
