"""Queries about actions, events, notifications and the whole outbox."""
