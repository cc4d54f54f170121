"""The machine's floor: what this device is. Knows no model."""
