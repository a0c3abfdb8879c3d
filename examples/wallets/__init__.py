"""A small wallet service on outboxio, and a demonstration of the service: ``outboxio demo``, or ``make demo``.

``domain.py`` has the tables, events and actions of the service. ``handlers.py`` reacts to the events, in two versions
of the service that are deployed in turn. ``demo.py`` tells the story and proves that the sums agree: ``audit.py`` reads
the tables, and ``show.py`` prints the rows. ``portable.py`` lets the example run on every database.
"""
