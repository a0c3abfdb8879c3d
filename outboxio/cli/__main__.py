"""``python -m outboxio.cli`` is the ``outboxio`` command."""

from outboxio.cli import main

main()
