"""The demonstration of the shop: ``make shop``."""
