"""A small wallet service on outboxio, and a demo of it: ``outboxio demo``, or ``make demo``.

``domain.py`` has the service's tables, events and actions, ``handlers.py`` its handlers. ``demo.py`` runs the service
and checks the result: ``audit.py`` reads the tables, and ``show.py`` prints code and outcome side by side.
``portable.py`` lets the example run on every database.
"""
