"""Jobs: functions that run once in the cluster for each scheduled time."""
