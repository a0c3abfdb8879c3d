"""The speed of outboxio beside bare SQL and asyncio, and beside its peers, in a single run.

    make bench                 every available database, small sizes, compared with the ratios of the kept run
    make bench-full            the sizes that docs/reference/performance.md reports; ARGS=--write writes the pages
    make bench-commits         two commits in turn (commits.py)

``scenarios.py`` lists the measurements and ``contestants.py`` the contestants. ``rounds.py`` runs the contestants in
turn, each in a fresh process. outboxio's runs are in ``ours.py`` and ``under_load.py``, the bare pipelines in
``bare*.py``, and the peers, each with a virtual environment, in ``peers/``. ``document.py`` writes the page of all
figures, ``pages.py`` the figures in other pages, and ``kept.py`` keeps and compares ratios.
"""
