"""Statistics, tables, plots and the HTML page, from records alone."""
