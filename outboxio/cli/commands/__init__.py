"""The work of the commands. ``app.py`` has the command lines; a module here has the commands of one kind."""
