"""The export step by step, and the dry run."""
