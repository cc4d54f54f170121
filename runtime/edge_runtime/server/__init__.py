"""`edge-run serve BUNDLE`: the OpenAI API over HTTP. Only the command imports it; the rest of the runtime does not."""
