"""The build host's floor: Gemma 4 checkpoints in, a bundle out."""
