"""Helpers without a word of the domain: time, text, identifiers, JSON, waiting."""
