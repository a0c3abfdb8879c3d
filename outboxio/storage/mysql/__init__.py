"""MySQL 8.0 and later, and MariaDB 10.11 and later, over aiomysql.

User-supplied engines may also use asyncmy. ``flavour.py`` has the differences between MySQL and MariaDB.
"""
