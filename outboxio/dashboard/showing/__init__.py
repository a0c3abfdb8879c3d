"""Convert values to HTML: templates and their filters, charts, terms, and static files."""
