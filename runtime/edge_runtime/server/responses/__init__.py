"""Responses in the formats of the APIs, complete or streamed."""
