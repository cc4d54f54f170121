"""The HTTP connection: access checks, limits and the chat page."""
