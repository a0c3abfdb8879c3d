"""The arguments, options and help of the commands, which ``outboxio/cli/commands`` implements."""
