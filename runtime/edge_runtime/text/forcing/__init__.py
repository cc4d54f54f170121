"""What a constraint forces: text that needs no drafter."""
