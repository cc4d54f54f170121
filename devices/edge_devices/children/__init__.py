"""Child processes whose time, memory and output are limited: for hostile input, and for libraries that may die."""
