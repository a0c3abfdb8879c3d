"""Statistics of the work of this process, kept in memory as plain numbers."""
