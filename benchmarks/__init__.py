"""How fast outboxio is: beside what bare SQL and asyncio can do, and beside its peers, in one run.

    make bench                 every database that is found, small sizes, a minute or two for each
    make bench-full            the sizes that docs/performance.md reports

``scenarios.py`` says what is measured, ``contestants.py`` who takes part, ``rounds.py`` runs them in turn, each in a
process of its own. What a process of ours does is in ``ours.py`` and ``under_load.py``; the bare pipelines are in
``bare*.py``; the peers, each with its own virtual environment, in ``peers/``.
"""
