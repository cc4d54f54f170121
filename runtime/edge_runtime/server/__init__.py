"""`edge-run serve BUNDLE`: the OpenAI API over HTTP. Nothing here is imported by the rest of the runtime, but for the command."""
