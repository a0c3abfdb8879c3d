"""Compare the speed of outboxio with bare SQL and asyncio, and with its peers, in a single run.

    make bench                 every available database, small sizes, compared with the saved ratios
    make bench-full            the sizes that benchmarks/results/performance.md reports; ARGS=--write writes the pages
    make bench-commits         two commits in alternation (commits.py)

``scenarios.py`` lists the measurements and ``contestants.py`` the contestants. ``rounds.py`` runs the contestants in
turn, each in a fresh process. outboxio's runs are in ``ours.py`` and ``under_load.py``, the bare pipelines in
``bare*.py``, and the peers, each with its own virtual environment, in ``peers/``. ``document.py`` writes the page with
all figures, ``pages.py`` writes the figures in other pages, and ``kept.py`` saves and compares ratios.
"""
