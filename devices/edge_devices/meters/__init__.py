"""One module per source of energy readings; each has `find(system)`, which lists meters as usable, present but not usable, or absent."""
