"""The export, step by step, and the plan of an export without writing it."""
