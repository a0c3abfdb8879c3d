"""The command lines: words, options and help of the commands. The work is in ``outboxio/cli/commands``."""
