"""The documentation site, built from docs/ and the docstrings. ``make docs`` builds and serves it.

A build has four steps: :mod:`website.stage` copies the pages, and the files outside docs/ that pages link to;
:mod:`website.navigation` reads the order of the pages from the index pages; Zensical generates HTML; and
:mod:`website.plain` adds the Markdown of each page, ``llms.txt`` and ``llms-full.txt``. :mod:`website.links` checks the
result. :mod:`website.tables` updates the reference tables from the code.
"""
