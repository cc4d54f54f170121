"""`edge-bench`, one file a command. Tables and JSON go to standard output, everything else to standard error."""
