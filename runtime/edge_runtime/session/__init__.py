"""The Python API: open a bundle, run one or several requests, chat, save KV state, monitor."""
