"""The work between entering and leaving ``running()``: shards, cluster locks, wake-ups."""
