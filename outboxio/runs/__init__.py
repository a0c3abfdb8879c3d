"""The rows that this process has read: queues, ordering, and every reason for which a due row waits."""
