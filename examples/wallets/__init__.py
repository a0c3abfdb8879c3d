"""A small wallet service on outboxio, and a demonstration of it: ``outboxio demo``, or ``make demo``.

``domain.py`` is what the service does: its tables, its events, its actions. ``handlers.py`` is what reacts to the
events, in the two versions of the service that are deployed one after the other. ``demo.py`` tells the story and proves
that it adds up, with the help of ``audit.py``, which reads the tables, and ``show.py``, which shows what was read.
``portable.py`` is there because the example runs on every database.
"""
