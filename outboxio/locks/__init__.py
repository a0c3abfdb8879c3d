"""Keyed locks of the application: one holder in the cluster for a key (decision 56)."""
