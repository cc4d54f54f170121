"""Drafts beside plain decoding: `edge-run compare` and `edge-run demo`."""
