"""Slots: the rows, runs and reads of a handler are divided among the partitions of this process."""
