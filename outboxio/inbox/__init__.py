"""The inbox: messages from outside become events, or are handled at once."""
