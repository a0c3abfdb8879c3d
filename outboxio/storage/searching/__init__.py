"""What all dialects share of the search for notifications: the walks, their places, and how a walk goes on."""
