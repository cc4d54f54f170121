"""The child process that decodes one media file: BUDGET as its argument, the file in, pixels or samples out.

Standard output holds a line of JSON and then the bytes; an error is a line with `error` and `missing` (a library is not installed).
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Decodes standard input."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not mix with the answer
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
