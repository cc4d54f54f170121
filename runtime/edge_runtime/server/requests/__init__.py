"""The fields that all interfaces share, and those of OpenAI's chat and completions: JSON to a checked request."""
