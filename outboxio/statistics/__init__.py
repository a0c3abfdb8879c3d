"""Statistics: what this process did, as plain numbers in memory that only rise."""
