"""The speed of outboxio beside bare SQL and asyncio, and beside its peers, in a single run.

    make bench                 every available database, small sizes, a minute or two per database
    make bench-full            the sizes that docs/reference/performance.md reports

``scenarios.py`` lists the measurements and ``contestants.py`` the contestants. ``rounds.py`` runs the contestants in
turn, each in a fresh process. outboxio's runs are in ``ours.py`` and ``under_load.py``, the bare pipelines in
``bare*.py``, and the peers, each with a virtual environment, in ``peers/``.
"""
