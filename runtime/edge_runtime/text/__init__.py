"""Between tokens and people: streaming text, channels, tool calls, chat template, constrained output."""
