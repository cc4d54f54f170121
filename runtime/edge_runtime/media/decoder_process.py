"""The child process that decodes one media file: `python -m edge_runtime.media.decoder_process BUDGET`, file in, pixels or samples out.

Standard output holds a line of JSON and then the bytes; an error is a line with `error` and `missing` (a library is not installed).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

# Address space, also of libraries; a picture of the largest size needs 0.6 GB.
MAX_MEMORY_BYTES = 2 << 30
MAX_CPU_SECONDS = 30


def limit_resources() -> None:
    """Limits memory, processor time and files of this process, where the system can."""
    try:
        import resource
    except ImportError:
        return  # Windows: only the limits of formats.py and the parent's timeout apply
    limits = {"AS": MAX_MEMORY_BYTES, "CPU": MAX_CPU_SECONDS, "FSIZE": 0, "CORE": 0}
    for name, most in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def main() -> None:
    """Decodes standard input."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not mix with the answer
    limit_resources()
    from edge_devices.errors import EdgeError
    from edge_runtime.errors import BackendError
    from edge_runtime.media.formats import kind_of
    from edge_runtime.media.image_decoding import decode_image
    from edge_runtime.media.sound_decoding import decode_sound

    data = sys.stdin.buffer.read()
    try:
        values = decode_image(data, int(sys.argv[1])).rgb if kind_of(data) == "image" else decode_sound(data).samples
    except (EdgeError, MemoryError) as error:
        text = str(error) or "decoding it needs too much memory; reduce it"
        output.write(json.dumps({"error": text, "missing": isinstance(error, BackendError)}).encode() + b"\n")
    else:
        output.write(json.dumps({"shape": values.shape}).encode() + b"\n")
        output.write(values.tobytes())
    output.flush()
    os._exit(0)  # destructors of C libraries have seen hostile input


if __name__ == "__main__":
    main()
