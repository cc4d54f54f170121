"""The small trained pair that ships with the package, as it is and widened."""
