"""The same with static shapes, for NPUs."""
