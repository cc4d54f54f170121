"""The backends, one folder for each library. They implement `interface.Backend`, and `Target` and `Drafter` of `interfaces`."""
