"""The benchmark on other devices: phones, boards and fleets."""
