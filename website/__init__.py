"""The documentation site, made of docs/ and of the docstrings; ``make docs`` builds and serves the site.

A build has four steps: :mod:`website.stage` copies the pages, and the files outside of docs/ that pages link to;
:mod:`website.navigation` reads the order of the pages from the index pages; Zensical makes HTML; and
:mod:`website.plain` puts the Markdown beside each page, with ``llms.txt`` and ``llms-full.txt``.
:mod:`website.links` checks the result. :mod:`website.tables` renews the tables of the reference from the code.
"""
