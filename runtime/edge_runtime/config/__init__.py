"""The YAML configuration and the settings it resolves to."""
