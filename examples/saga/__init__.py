"""A saga over two services: orders and payments, each with an outbox, and with money that comes back."""
