"""The connection: who may ask, how long, how large, the chat page."""
