"""The YAML configuration, and the settings that result from it."""
