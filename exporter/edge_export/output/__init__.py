"""A folder that appears complete or not at all, and what --force may replace."""
