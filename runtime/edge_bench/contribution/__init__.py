"""Energy records that anybody can make on a device of their own, and that others can check and pool."""
