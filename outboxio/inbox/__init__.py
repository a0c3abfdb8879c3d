"""The inbox: stores messages from other systems as events, or handles them immediately."""
