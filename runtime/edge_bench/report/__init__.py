"""Statistics, tables, plots and the HTML page, computed from records alone."""
