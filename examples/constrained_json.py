"""Text that is always valid JSON of a schema, with or without drafts.

python examples/constrained_json.py my-bundle          (needs edge-mtp[grammar])
"""

import json
import sys

import edge_runtime

if len(sys.argv) != 2:
    sys.exit("usage: python examples/constrained_json.py my-bundle")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "sides": {"type": "integer", "minimum": 3, "maximum": 12}},
    "required": ["name", "sides"],
    "additionalProperties": False,
}

with edge_runtime.open_session(sys.argv[1]) as session:
    generation = session.generate("triangle = ", constraint=edge_runtime.JsonSchema(SCHEMA), max_tokens=128)
    shape = json.loads("".join(generation))
    assert generation.complete  # False if max_tokens ended it
    print(f"{shape['name']!r} has {shape['sides']} sides")
