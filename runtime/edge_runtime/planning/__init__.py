"""What a pair will need and do before it is opened: memory, speed, joules."""
