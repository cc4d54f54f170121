"""Between tokens and people: streamed text, channels, tool calls, chat templates and constrained output."""
