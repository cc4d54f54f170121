"""Meters of Android devices."""
