"""Fan-out: undelivered events become notifications, one for each subscribed handler."""
