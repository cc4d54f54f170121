"""Request JSON to a checked request."""
