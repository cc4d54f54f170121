"""One module per source of energy figures; each has `find(system)`, which says what is usable, present but not usable, or absent."""
