"""A saga across two services, orders and payments: each has an outbox, and a cancelled order is refunded."""
