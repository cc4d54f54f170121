"""The one thread that runs requests on session slots."""
