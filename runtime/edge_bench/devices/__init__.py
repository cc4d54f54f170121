"""The same benchmark on phones, boards and fleets."""
