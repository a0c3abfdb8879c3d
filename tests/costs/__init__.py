"""The exact cost of an event, an action and an idle second, in counts that no clock changes.

``costs.toml`` has the figures, ``python -m tests.costs`` writes them, and ``test_costs.py`` compares.
"""
