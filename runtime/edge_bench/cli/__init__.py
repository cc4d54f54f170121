"""The commands of `edge-bench`. Tables and JSON go to standard output, everything else to standard error."""
