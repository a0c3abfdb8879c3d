"""Registration of handlers: options, and all checks of a registration."""
