"""From values to HTML: templates and their filters, charts, words, and the files that pages load."""
