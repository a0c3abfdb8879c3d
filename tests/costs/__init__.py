"""The exact cost of an event, an action and an idle second, in counts that do not depend on a clock.

``costs.toml`` has the figures, ``python -m tests.costs`` writes them, and ``test_costs.py`` compares.
"""
