"""Jobs: functions that run at set moments, once in the cluster for each moment."""
