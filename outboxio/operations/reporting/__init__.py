"""The numbers that leave the process: figures of the tables, figures by minute, reports of processes."""
