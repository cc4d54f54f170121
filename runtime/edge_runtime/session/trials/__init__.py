"""Requests that a session runs to check or to time itself."""
