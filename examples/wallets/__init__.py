"""A small wallet service on outboxio, and a demonstration of the service: ``outboxio demo``, or ``make demo``.

``domain.py`` has the tables, events and actions of the service. ``handlers.py`` reacts to the events. ``demo.py`` tells
the story and proves that the sums agree: ``audit.py`` reads the tables, and ``show.py`` prints code and outcome side by
side. ``portable.py`` lets the example run on every database.
"""
