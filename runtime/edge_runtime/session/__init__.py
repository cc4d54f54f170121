"""The Python API: open a bundle, run one or several requests, chat, cache prompts and monitor."""
