"""For operators who share handlers among processes: owners, numbers, alarms, advice."""
