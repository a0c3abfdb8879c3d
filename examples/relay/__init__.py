"""Two services and a broker between them: the outbox of a shop, and the inbox of a warehouse."""
