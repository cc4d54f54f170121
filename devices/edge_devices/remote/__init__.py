"""Another device: how it is reached, what is sent there, and a job on it, from its preflight to what happened."""
