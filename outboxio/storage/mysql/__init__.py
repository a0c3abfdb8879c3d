"""MySQL 8.0 and later, and MariaDB 10.11 and later, over aiomysql. MariaDB is MySQL plus its differences.

Engines of the application may be over asyncmy, too.
"""
