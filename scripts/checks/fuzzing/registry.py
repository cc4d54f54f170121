"""All readers that can be fuzzed."""

from __future__ import annotations

from fuzzing.readers import Reader


def all_readers() -> dict[str, Reader]:
    """Returns all readers by name."""
    from fuzzing import device_readers, export_readers, gguf_readers, graph_readers, media_readers, model_readers, runtime_readers

    modules = (runtime_readers, export_readers, device_readers, media_readers, model_readers, gguf_readers, graph_readers)
    readers: list[Reader] = [reader for module in modules for reader in module.READERS]
    return {reader.name: reader for reader in readers}
