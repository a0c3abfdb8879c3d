"""Sharing handlers among processes: which process owns which partition."""
