"""A drafter tuned to its user: trained on what the target writes after the user's own texts."""
