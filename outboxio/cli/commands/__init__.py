"""The implementation of the commands. Their arguments are in ``outboxio/cli/arguments``."""
