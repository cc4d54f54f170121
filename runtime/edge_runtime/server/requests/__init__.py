"""Turns JSON into a checked request: the fields that all APIs share, and those of OpenAI's chat and completions."""
