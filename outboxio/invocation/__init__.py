"""A run: the envelope, the call of the handler by kind of delivery, and the outcome."""
