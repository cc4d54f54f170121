"""`edge-run BUNDLE --serve`: the OpenAI API over HTTP. Nothing here is imported by the rest of the runtime, but for the command."""
