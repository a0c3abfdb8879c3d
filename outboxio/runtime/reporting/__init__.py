"""What a process says of itself."""
