"""Health: is this process alive, is it ready, and does the outbox work? For people, probes and service managers."""
