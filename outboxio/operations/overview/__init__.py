"""The overview: figures, and a verdict in sentences, for the command line, pages, health and alerts (decision 45)."""
