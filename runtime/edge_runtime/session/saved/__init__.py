"""Files of a session: conversations, and K/V rows with their tokens."""
