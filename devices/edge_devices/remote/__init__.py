"""Remote devices: the connection, sending files, and jobs, from the checks before one to the record of what happened."""
